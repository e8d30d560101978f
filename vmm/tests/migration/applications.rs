//! VMs with applications of an accelerator: snapshots that have them, and moves that take them along.
//! The guest opens two slices, and counts. Their workers are threads here, which speak as workers do,
//! and take as long as a test wants, or die.

use std::{
    io::{self, Read},
    os::unix::fs::FileExt,
    process::ChildStdout,
    sync::mpsc::{self, Receiver, Sender},
};

use remoting_proto::{
    port::{ATTACHMENT, Attachment, DEVICE, READY, VENDOR, registers},
    wire::Blob,
};
use remoting_transport::{
    control::{self, Command as Ask, Reply},
    socket,
};

use super::*;

mod copies;
mod postcopy;

/// Slices of the port.
const SLICES: usize = 2;

/// Opens both slices of the accelerator, and counts.
fn code() -> Vec<u8> {
    let id = u32::from(DEVICE) << 16 | u32::from(VENDOR);
    let address = [0x66, 0xba, 0xf8, 0x0c, 0xef]; // mov dx, 0xcf8; out dx, eax
    let read = [0x66, 0xba, 0xfc, 0x0c, 0xed]; // mov dx, 0xcfc; in eax, dx
    let mut code = vec![0xbb, 0, 0, 0, 0x80]; // mov ebx, 0x80000000
    let next = code.len();
    code.extend([0x81, 0xc3, 0, 8, 0, 0, 0x89, 0xd8]); // add ebx, 0x800; mov eax, ebx
    code.extend(address);
    code.extend(read);
    code.push(0x3d); // cmp eax, id
    code.extend(id.to_le_bytes());
    code.push(0x75); // jne next
    code.push(back(next, code.len()));
    code.extend([0x89, 0xd8, 0x0c, 0x10]); // mov eax, ebx; or al, 0x10: BAR 0
    code.extend(address);
    code.extend(read);
    code.extend([0x24, 0xf0, 0x89, 0xc7]); // and al, 0xf0; mov edi, eax
    code.extend([0x89, 0xd8, 0x0c, 0x04]); // mov eax, ebx; or al, 4: the command register
    code.extend(address);
    code.extend(read);
    code.extend([0x0c, 6, 0xef]); // or al, 6; out dx, eax
    for slice in 0..SLICES as u32 {
        code.extend([0xc7, 0x87]); // mov dword [edi + register], 1: open it
        code.extend((registers::SLICE as u32 + 4 * slice).to_le_bytes());
        code.extend(1_u32.to_le_bytes());
    }
    code.extend(counting_code());
    code
}

/// A pool of workers, which are connections that come here.
struct Pool {
    path: PathBuf,
    workers: Receiver<Worker>,
}

/// A worker of a slice.
struct Worker {
    stream: UnixStream,
    slice: u32,
    takes_up: bool,
}

impl Pool {
    fn new(dir: &Path, name: &str) -> Self {
        let path = dir.join(name);
        let listener = UnixListener::bind(&path).unwrap();
        let (sender, workers): (Sender<Worker>, _) = mpsc::channel();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let stream = stream.unwrap();
                let mut bytes = [0; ATTACHMENT];
                // Who only looks whether there is a pool says nothing.
                let Ok(files) = socket::receive_exact(&stream, &mut bytes) else {
                    continue;
                };
                assert_eq!(files.len(), 4);
                let attachment = Attachment::from_bytes(&bytes).unwrap();
                let worker = Worker {
                    stream,
                    slice: attachment.slice,
                    takes_up: attachment.takes_up,
                };
                if sender.send(worker).is_err() {
                    break;
                }
            }
        });
        Self { path, workers }
    }

    /// The workers of both slices, in their order.
    fn both(&self) -> [Worker; SLICES] {
        let mut workers = [self.next(), self.next()];
        workers.sort_by_key(|worker| worker.slice);
        workers
    }

    fn next(&self) -> Worker {
        self.workers.recv_timeout(PATIENCE).unwrap()
    }
}

impl Worker {
    /// What it is asked for next.
    fn asked(&self) -> (Ask, Option<fs::File>) {
        let (command, files) = control::receive::<Ask>(&self.stream).unwrap().unwrap();
        (command, files.into_iter().next().map(fs::File::from))
    }

    /// It cannot be copied while it serves. It is asked to give up what it may have of that when all have
    /// answered.
    fn is_not_copied(&self) {
        assert!(matches!(self.asked().0, Ask::Precopy(0, _)));
        self.answers(&Reply::Refused(Blob(b"its device is busy".to_vec())));
    }

    /// It is copied while it serves. So few bytes are copied once.
    fn is_copied(&self) {
        self.is_copied_after(0, "a copy");
    }

    fn is_copied_after(&self, rounds: u32, what: &str) {
        let (command, file) = self.asked();
        assert!(
            matches!(command, Ask::Precopy(number, _) if number == rounds),
            "{command:?}"
        );
        self.writes(what, file);
    }

    /// It is asked how many bytes it has made since it was copied.
    fn has_made(&self, bytes: u64) {
        assert_eq!(self.asked().0, Ask::Examine());
        self.answers(&Reply::Made(bytes));
    }

    fn saves_rest(&self) {
        self.saves_rest_of(1);
    }

    fn saves_rest_of(&self, rounds: u32) {
        let (command, file) = self.asked();
        assert_eq!(command, Ask::SaveRest(rounds, false));
        self.writes("the rest", file);
    }

    fn writes(&self, what: &str, file: Option<fs::File>) {
        let state = format!("{what} of slice {}", self.slice);
        file.unwrap().write_all_at(state.as_bytes(), 0).unwrap();
        self.answers(&Reply::Done());
    }

    /// It is given this, by this command.
    fn is_given(&self, by: &Ask, what: &str) {
        let (command, file) = self.asked();
        assert_eq!(command, *by);
        let mut state = String::new();
        let mut file = file.unwrap();
        io::Seek::rewind(&mut file).unwrap();
        file.read_to_string(&mut state).unwrap();
        assert_eq!(state, format!("{what} of slice {}", self.slice));
    }

    /// It makes a copy of an application that goes on elsewhere.
    fn prepares(&self) {
        self.is_ready();
        self.is_given(&Ask::Prepare(false), "a copy");
        self.answers(&Reply::Done());
    }

    fn answers(&self, reply: &Reply) {
        control::send(&self.stream, reply, &[]).unwrap();
    }

    fn stops(&self) {
        assert!(matches!(self.asked().0, Ask::Quiesce(..)));
        self.answers(&Reply::Done());
    }

    fn saves(&self) {
        let (command, file) = self.asked();
        assert_eq!(command, Ask::Save());
        self.writes("the state", file);
    }

    /// It goes on, whatever it was asked for and has not answered.
    fn goes_on(&self) {
        assert_eq!(self.asked().0, Ask::Resume());
        self.answers(&Reply::Done());
    }

    /// One that was started for an application that is saved is ready for it.
    fn is_ready(&self) {
        assert!(self.takes_up);
        self.answers(&Reply::Done());
    }

    fn restores(&self) {
        self.is_given(&Ask::Restore(false), "the state");
    }

    fn serves(&self) {
        assert_eq!(self.asked().0, Ask::Go());
    }

    /// Its machine does not need it any more.
    fn ends(mut self) {
        match self.stream.read(&mut [0]) {
            Ok(read) => assert_eq!(read, 0),
            // What it has said has not been read by then.
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
        }
    }
}

/// A machine whose two slices are open, and their workers.
fn opened(dir: &Path, pool: &Pool) -> (Vmm, [Worker; SLICES]) {
    let path = dir.join("kernel");
    fs::write(&path, kernel(&code())).unwrap();
    let serial = format!("file={}", dir.join("first/serial").display());
    let accel = format!(
        "socket={},slices={SLICES},window=16M,id=gpu",
        pool.path.display()
    );
    let arguments = ["--kernel", path.to_str().unwrap(), "--memory", "size=32M"];
    let devices = ["--serial", &serial, "--console", "off", "--accel", &accel];
    let vmm = Vmm::start(dir, "first", &[&arguments[..], &devices].concat());
    let workers = pool.both();
    for worker in &workers {
        assert!(!worker.takes_up);
        (&worker.stream).write_all(&[READY]).unwrap();
    }
    let mut vmm = vmm;
    vmm.until("it counts", |vmm| !vmm.printed().is_empty());
    vmm.until("its slices are open", |vmm| {
        vmm.counter("workers_started") == SLICES as u64
    });
    (vmm, workers)
}

impl Vmm {
    fn counter(&self, name: &str) -> u64 {
        let all: Value = serde_json::from_slice(&self.ctl(&["counters"]).stdout).unwrap();
        all["gpu"][name].as_u64().unwrap()
    }

    fn ask(&self, arguments: &[&str]) -> Child {
        Command::new(GANTRY)
            .args(["ctl", "--socket", self.socket.to_str().unwrap()])
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    #[track_caller]
    fn does(&self, arguments: &[&str]) {
        let output = self.ctl(arguments);
        assert!(
            output.status.success(),
            "{}\n{}",
            error(&output),
            self.said()
        );
    }

    /// What is refused, and why.
    #[track_caller]
    fn refuses(&self, arguments: &[&str], why: &str) {
        let output = self.ctl(arguments);
        assert!(!output.status.success());
        assert!(error(&output).contains(why), "{}", error(&output));
    }

    /// The guest runs, and prints.
    fn counts_on(&mut self) {
        let before = self.printed().len();
        self.until("it counts on", |vmm| vmm.printed().len() > before + 100);
    }
}

/// Waits until whoever watches has seen a phase, and what it has printed until then.
fn shown(watching: &mut Child, phase: &str) -> (ChildStdout, Vec<u8>) {
    let mut stdout = watching.stdout.take().unwrap();
    let mut shown = Vec::new();
    while !String::from_utf8_lossy(&shown).contains(phase) {
        let mut part = [0; 256];
        let count = stdout.read(&mut part).unwrap();
        assert!(count > 0, "{}", String::from_utf8_lossy(&shown));
        shown.extend(&part[..count]);
    }
    (stdout, shown)
}

fn error(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
fn failed(child: Child, why: &str) {
    let output = child.wait_with_output().unwrap();
    assert!(!output.status.success());
    assert!(error(&output).contains(why), "{}", error(&output));
}

#[test]
fn a_snapshot_that_waits_for_workers_lets_others_ask_and_can_be_cancelled() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::new(dir.path(), "pool");
    let (mut vmm, [one, other]) = opened(dir.path(), &pool);
    let to = dir.path().join("snapshot");
    let to = to.to_str().unwrap();
    let save = ["snapshot", to, "--accel", "save"];
    vmm.refuses(&save, "pause it first");
    vmm.refuses(
        &["send-migration", "unix:/nowhere", "--accel-copies"],
        "accel_copies=true needs accel=Move",
    );
    vmm.refuses(
        &["send-migration", "unix:/nowhere", "--accel-postcopy"],
        "accel_postcopy=true needs accel=Move",
    );
    vmm.does(&["pause"]);
    let saving = vmm.ask(&save);
    other.stops();
    assert!(matches!(one.asked().0, Ask::Quiesce(..)));
    // It takes its time, and nobody else waits for it.
    vmm.does(&["ping"]);
    vmm.does(&["info"]);
    vmm.refuses(&["resume"], "snapshot of the VM is being written");
    vmm.refuses(
        &["remove-device", "gpu"],
        "snapshot of the VM is being written",
    );
    vmm.refuses(&["send-migration", "unix:/nowhere"], "snapshot");
    vmm.does(&["cancel-migration"]);
    failed(saving, "cancelled");
    other.goes_on();
    // Its answer comes late.
    one.answers(&Reply::Done());
    one.goes_on();
    vmm.does(&["resume"]);
    vmm.counts_on();
    vmm.refuses(&["cancel-migration"], "no migration is going on");

    vmm.does(&["pause"]);
    let saving = vmm.ask(&save);
    for worker in [&other, &one] {
        worker.stops();
    }
    for worker in [&one, &other] {
        worker.saves();
    }
    for worker in [&one, &other] {
        worker.goes_on();
    }
    assert!(saving.wait_with_output().unwrap().status.success());
    vmm.does(&["resume"]);
    vmm.counts_on();
    let printed = vmm.printed();
    vmm.kill();
    drop((one, other));

    // The same VM again, whose workers take their time, too.
    let mut second = Vmm::start(dir.path(), "second", &[]);
    let from = format!("source_url=file://{to},resume=on");
    let restoring = second.ask(&["restore", &from]);
    let [one, other] = pool.both();
    for worker in [&one, &other] {
        worker.is_ready();
        worker.restores();
    }
    second.does(&["info"]);
    second.refuses(&["resume"], "is being restored");
    second.does(&["cancel-migration"]);
    failed(restoring, "cancelled");
    one.ends();
    other.ends();
    second.refuses(&["info"], "");

    second.serial = vmm.serial.clone();
    let restoring = second.ask(&["restore", &from]);
    let workers = pool.both();
    for worker in &workers {
        worker.is_ready();
    }
    for worker in &workers {
        worker.restores();
        worker.answers(&Reply::Done());
    }
    for worker in &workers {
        worker.serves();
    }
    assert!(restoring.wait_with_output().unwrap().status.success());
    second.until("it counts on", |vmm| vmm.printed().len() > printed.len());
    assert_eq!(second.counter("slices_in_use"), SLICES as u64);
}

#[test]
fn a_vmm_that_begins_with_a_restore_answers_while_it_waits_for_workers() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::new(dir.path(), "pool");
    let (mut vmm, workers) = opened(dir.path(), &pool);
    let to = dir.path().join("snapshot");
    vmm.does(&["pause"]);
    let saving = vmm.ask(&["snapshot", to.to_str().unwrap(), "--accel", "save"]);
    workers.iter().for_each(Worker::stops);
    workers.iter().for_each(Worker::saves);
    workers.iter().for_each(Worker::goes_on);
    assert!(saving.wait_with_output().unwrap().status.success());
    vmm.kill();
    let from = format!("source_url=file://{},resume=on", to.display());
    let mut next = Vmm::start(dir.path(), "next", &["--restore", &from]);
    let workers = pool.both();
    next.does(&["ping"]);
    next.refuses(&["resume"], "is being restored");
    for worker in &workers {
        worker.is_ready();
        worker.restores();
        worker.answers(&Reply::Done());
    }
    workers.iter().for_each(Worker::serves);
    next.until("it has open slices", |vmm| {
        vmm.counter("slices_in_use") == SLICES as u64
    });

    // Without a pool there is no such VM.
    let gone = dir.path().join("pool");
    fs::remove_file(gone).unwrap();
    let output = Command::new(GANTRY)
        .arg("--api-socket")
        .arg(dir.path().join("api"))
        .args(["--restore", &from])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(!output.status.success());
    assert!(error(&output).contains("slice 0"), "{}", error(&output));
}

/// A move of both applications from one machine to another, with a pool each.
struct Going {
    first: Vmm,
    second: Vmm,
    /// Of the first machine.
    workers: Vec<Worker>,
    there: Pool,
    sending: Child,
    receiving: Child,
    _pool: Pool,
    dir: tempfile::TempDir,
}

/// Both applications are asked to stop, and for nothing before.
fn going() -> Going {
    setting_off(&[], &Reply::Done())
}

/// Both applications are about to be copied.
fn going_by_copies() -> Going {
    setting_off(&["--accel-copies"], &Reply::Done())
}

/// What each application's worker says of whether it can be moved.
fn setting_off(more: &[&str], may_move: &Reply) -> Going {
    let dir = tempfile::tempdir().unwrap();
    let (pool, there) = (
        Pool::new(dir.path(), "pool"),
        Pool::new(dir.path(), "there"),
    );
    let (first, workers) = opened(dir.path(), &pool);
    let mut second = Vmm::start(dir.path(), "second", &[]);
    let path = second.socket.with_file_name("migration");
    let url = format!("unix:{}", path.display());
    let rename = format!("{}={}", pool.path.display(), there.path.display());
    let receiving = second.receive_at(&url, &first.serial, &["--rename", &rename]);
    second.until("it listens", |_| path.exists());
    let send = [
        "send-migration",
        &url,
        "--preserve-source",
        "--watch",
        "--accel",
        "move",
    ];
    let sending = first.ask(&[&send, more].concat());
    for worker in &workers {
        assert_eq!(worker.asked().0, Ask::Examine());
        worker.answers(may_move);
    }
    Going {
        first,
        second,
        workers: workers.into(),
        there,
        sending,
        receiving,
        _pool: pool,
        dir,
    }
}

impl Going {
    fn stop_and_save(&self) {
        self.workers.iter().for_each(Worker::stops);
        self.workers.iter().for_each(Worker::saves);
    }

    /// The machine has gone, with its applications.
    fn arrives(mut self) -> (Vmm, tempfile::TempDir) {
        let [sent, received] =
            [self.sending, self.receiving].map(|child| child.wait_with_output().unwrap());
        assert!(
            sent.status.success() && received.status.success(),
            "{}{}\n{}\n{}",
            error(&sent),
            error(&received),
            self.first.said(),
            self.second.said()
        );
        self.second.counts_on();
        check_counting(&[&self.first, &self.second]);
        self.workers.into_iter().for_each(Worker::ends);
        (self.second, self.dir)
    }

    /// The machine is where it was, with the applications of these workers, so many of which are lost.
    fn stays(mut self, why: &str, lost: u64) {
        let sent = self.sending.wait_with_output().unwrap();
        assert!(!sent.status.success());
        assert!(error(&sent).contains(why), "{}", error(&sent));
        assert!(!self.receiving.wait_with_output().unwrap().status.success());
        self.first.counts_on();
        check_counting(&[&self.first]);
        let left = self.workers.len() as u64;
        assert_eq!(left + lost, SLICES as u64);
        self.first
            .until("one has ended", |vmm| vmm.counter("workers_lost") == lost);
        assert!(self.second.printed().is_empty());
        // They serve, and end with the machine.
        self.first.kill();
        self.workers.into_iter().for_each(Worker::ends);
    }
}

#[test]
fn a_machine_moves_with_its_applications() {
    if !has_kvm() {
        return;
    }
    let going = going();
    going.workers.iter().for_each(Worker::stops);
    // The guest runs until all have stopped.
    going.workers.iter().for_each(Worker::saves);
    let new = going.there.both();
    for worker in &new {
        worker.is_ready();
    }
    for worker in &new {
        worker.restores();
        worker.answers(&Reply::Done());
    }
    for worker in &new {
        worker.serves();
    }
    let (second, _dir) = going.arrives();
    let info = second.migration();
    assert_eq!(info["accel_bytes"], 0, "{info}");
    assert_eq!(second.counter("slices_in_use"), SLICES as u64);
    assert_eq!(second.counter("workers_lost"), 0);
}

#[test]
fn applications_that_cannot_be_moved_are_named_before_anything_is_sent() {
    if !has_kvm() {
        return;
    }
    for how in [&["--dry-run"][..], &[], &["--accel-copies"]] {
        let why = Blob(b"it has shared virtual memory".to_vec());
        let mut going = setting_off(how, &Reply::Refused(why));
        let sent = going.sending.wait_with_output().unwrap();
        assert!(!sent.status.success());
        for slice in 0..SLICES {
            let named =
                format!("gpu: the application of slice {slice}: it has shared virtual memory");
            assert!(error(&sent).contains(&named), "{}", error(&sent));
        }
        going.first.counts_on();
        assert_eq!(going.first.migration()["sent_bytes"], 0);
        // The destination has not heard of it, and goes on to wait.
        assert!(going.receiving.try_wait().unwrap().is_none());
        going.second.does(&["cancel-migration"]);
        assert!(!going.receiving.wait().unwrap().success());
        going.first.kill();
        // They serve all the time.
        going.workers.into_iter().for_each(Worker::ends);
    }
}

#[test]
fn a_machine_whose_source_is_killed_is_given_up_before_its_workers_have_answered() {
    if !has_kvm() {
        return;
    }
    for copies in [true, false] {
        let mut going = match copies {
            true => going_by_copies(),
            false => going(),
        };
        match copies {
            true => going.workers.iter().for_each(Worker::is_copied),
            false => going.stop_and_save(),
        }
        let new = going.there.both();
        new.iter().for_each(Worker::is_ready);
        for worker in &new {
            match copies {
                true => worker.is_given(&Ask::Prepare(false), "a copy"),
                false => worker.restores(),
            }
        }
        // That a VM stands still does not say that it goes on elsewhere.
        let _stdout = (!copies).then(|| shown(&mut going.sending, "Final"));
        going.first.kill();
        let received = going.receiving.wait_with_output().unwrap();
        assert!(!received.status.success());
        let said = error(&received);
        assert!(said.contains("the connection broke"), "{said}");
        new.into_iter().for_each(Worker::ends);
        failed(going.sending, "whether the VM has moved is not known");
        // Another one may come.
        let url = format!("unix:{}", going.dir.path().join("again").display());
        let mut receiving = going.second.receive_at(&url, &going.first.serial, &[]);
        going
            .second
            .until("it listens", |_| going.dir.path().join("again").exists());
        going.second.does(&["cancel-migration"]);
        assert!(!receiving.wait().unwrap().success());
    }
}

#[test]
fn a_move_that_is_cancelled_while_an_application_stops_or_is_saved_leaves_all_of_them() {
    if !has_kvm() {
        return;
    }
    for saves in [false, true] {
        let mut going = going();
        let [slow, ready] = &going.workers[..] else {
            panic!()
        };
        if saves {
            slow.stops();
            ready.stops();
            assert!(matches!(slow.asked().0, Ask::Save()));
        } else {
            assert!(matches!(slow.asked().0, Ask::Quiesce(..)));
            ready.stops();
            // The guest runs meanwhile.
            going.first.counts_on();
        }
        let [slow, ready] = &going.workers[..] else {
            panic!()
        };
        going.first.does(&["info"]);
        going.first.refuses(&["pause"], "being moved");
        going.first.does(&["cancel-migration"]);
        ready.goes_on();
        slow.answers(&Reply::Done());
        slow.goes_on();
        going.stays("cancelled", 0);
    }
}

#[test]
fn a_machine_stays_with_its_applications_if_one_of_them_refuses_or_is_lost() {
    if !has_kvm() {
        return;
    }
    // One that cannot stop.
    let refusing = going();
    refusing.workers[1].stops();
    assert!(matches!(refusing.workers[0].asked().0, Ask::Quiesce(..)));
    refusing.workers[0].answers(&Reply::Refused(Blob(b"it is busy".to_vec())));
    refusing.workers.iter().for_each(Worker::goes_on);
    refusing.stays("it is busy", 0);
    // One whose worker is killed while it stops, and while it saves.
    for saves in [false, true] {
        let mut going = going();
        let killed = going.workers.remove(0);
        match saves {
            false => {
                assert!(matches!(killed.asked().0, Ask::Quiesce(..)));
                drop(killed);
                going.workers[0].stops();
                going.workers[0].goes_on();
            }
            true => {
                killed.stops();
                going.workers[0].stops();
                assert_eq!(killed.asked().0, Ask::Save());
                drop(killed);
                // The others are saved, or are not, and go on.
                let (command, _) = going.workers[0].asked();
                if command == Ask::Save() {
                    going.workers[0].answers(&Reply::Done());
                    going.workers[0].goes_on();
                } else {
                    going.workers[0].answers(&Reply::Done());
                }
            }
        }
        going.stays("has ended", 1);
    }
}

#[test]
fn a_machine_stays_with_its_applications_if_none_serves_them_at_the_destination() {
    if !has_kvm() {
        return;
    }
    for step in ["ready", "restore", "refuse", "pool", "cancel"] {
        let going = going();
        if step == "pool" {
            fs::remove_file(&going.there.path).unwrap();
        }
        going.stop_and_save();
        let mut why = if step == "pool" {
            "does not answer"
        } else {
            "has ended"
        };
        if step != "pool" {
            let [one, other] = going.there.both();
            one.is_ready();
            match step {
                "ready" => drop(other),
                "restore" => {
                    other.is_ready();
                    other.restores();
                    drop(other);
                }
                "refuse" => {
                    other.is_ready();
                    other.restores();
                    other.answers(&Reply::Refused(Blob(b"it has no such device".to_vec())));
                    why = "no such device";
                }
                _ => {
                    other.is_ready();
                    other.restores();
                    going.second.does(&["cancel-migration"]);
                    why = "cancelled";
                }
            }
            one.restores();
            if step != "cancel" {
                one.answers(&Reply::Done());
            }
            one.ends();
        }
        going.workers.iter().for_each(Worker::goes_on);
        going.stays(why, 0);
    }
}

#[test]
fn a_worker_that_is_lost_after_the_machine_has_gone_costs_its_application_alone() {
    if !has_kvm() {
        return;
    }
    let going = going();
    going.stop_and_save();
    let [one, other] = going.there.both();
    for worker in [&one, &other] {
        worker.is_ready();
    }
    one.restores();
    other.restores();
    one.answers(&Reply::Done());
    other.answers(&Reply::Done());
    drop(other);
    one.serves();
    let (mut second, _dir) = going.arrives();
    second.until("one has ended", |vmm| vmm.counter("workers_lost") == 1);
    assert_eq!(second.counter("slices_in_use"), SLICES as u64);
    second.counts_on();
}
