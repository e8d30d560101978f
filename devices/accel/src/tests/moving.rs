//! Applications that are moved to other workers.

use std::{
    fs::File,
    io::Read,
    mem,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::FileExt,
    },
    path::PathBuf,
    sync::mpsc,
    thread,
};

use base::{Cancel, Patience};
use remoting_proto::wire::Blob;
use remoting_transport::control::{self, Command as Ask, LONG, Reply};

use super::{
    super::{
        moving::{Handle, Move, Moved},
        saved::{Archive, Error, Standing, Stopped},
    },
    *,
};

mod postcopy;
mod rounds;
mod served;

/// A pool in addition to the port's own.
struct Other {
    pool: UnixListener,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

fn other() -> Other {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("other");
    Other {
        pool: UnixListener::bind(&path).unwrap(),
        path,
        _folder: folder,
    }
}

impl Rig {
    /// This port, as a snapshot or migration sees it.
    pub(super) fn ports(&self) -> Vec<(String, Handle)> {
        vec![("gpu".to_owned(), self.function.lock().unwrap().handle())]
    }

    /// Stops all applications.
    fn stop(&self, patience: Patience) -> Result<Standing, Error> {
        Standing::new(self.ports(), Duration::from_millis(250), patience)
    }

    /// Number of workers that belong to the port and can be borrowed.
    fn lendable(&self) -> usize {
        let port = self.function.lock().unwrap().handle();
        port.desk.lend(None).unwrap().len()
    }

    fn eventually(&self, what: impl Fn() -> bool) {
        let start = Instant::now();
        while !what() {
            assert!(start.elapsed() < Duration::from_secs(30));
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn save(&self, archive: &mut Archive) -> Result<Stopped, Error> {
        self.stop(Patience::within(LONG))?.save(archive)
    }

    fn start_move(&self, slice: Option<u32>, socket: &std::path::Path) -> mpsc::Receiver<Moved> {
        self.start_move_until(slice, socket, Cancel::default())
    }

    fn start_move_until(
        &self,
        slice: Option<u32>,
        socket: &std::path::Path,
        cancel: Cancel,
    ) -> mpsc::Receiver<Moved> {
        self.start_move_by(slice, socket, cancel, false)
    }

    fn start_move_by(
        &self,
        slice: Option<u32>,
        socket: &std::path::Path,
        cancel: Cancel,
        postcopy: bool,
    ) -> mpsc::Receiver<Moved> {
        self.start_asked(Move {
            slice,
            to: Pool {
                socket: socket.to_owned(),
                device: "other".to_owned(),
            },
            drain: Duration::from_millis(250),
            postcopy,
            cancel,
            all_gone: Arc::default(),
        })
    }

    fn start_asked(&self, asked: Move) -> mpsc::Receiver<Moved> {
        let port = self.function.lock().unwrap().handle();
        let (told, moved) = mpsc::channel();
        port.start(asked, move |moved| told.send(moved).unwrap())
            .unwrap();
        moved
    }
}

fn next(stream: &UnixStream) -> (Ask, Option<OwnedFd>) {
    let (command, files) = control::receive::<Ask>(stream).unwrap().unwrap();
    (command, files.into_iter().next())
}

fn done(stream: &UnixStream) {
    control::send(stream, &Reply::Done(), &[]).unwrap();
}

fn refuse(stream: &UnixStream, why: &str) {
    let refused = Reply::Refused(Blob(why.as_bytes().to_vec()));
    control::send(stream, &refused, &[]).unwrap();
}

/// Acts as a worker that stops and saves `state`.
fn saves(stream: &UnixStream, state: &[u8]) {
    assert!(matches!(next(stream).0, Ask::Quiesce(250, _)));
    done(stream);
    let (command, file) = next(stream);
    assert_eq!(command, Ask::Save());
    File::from(file.unwrap()).write_all_at(state, 0).unwrap();
    done(stream);
}

/// Acts as a worker that is copied while it serves.
fn precopies(stream: &UnixStream, round: u32, state: &[u8]) {
    let (command, file) = next(stream);
    assert!(matches!(command, Ask::Precopy(number, 1..=120_000) if number == round));
    File::from(file.unwrap()).write_all_at(state, 0).unwrap();
    done(stream);
}

/// Acts as a worker that cannot be copied now.
fn does_not_precopy(stream: &UnixStream) {
    assert!(matches!(next(stream).0, Ask::Precopy(0, _)));
    refuse(stream, "it is at something");
}

/// Acts as a worker that stops and saves `state` after a number of rounds.
fn saves_rest(stream: &UnixStream, rounds: u32, state: &[u8]) {
    saves_rest_by(stream, rounds, false, state);
}

fn saves_rest_by(stream: &UnixStream, rounds: u32, postcopy: bool, state: &[u8]) {
    assert!(matches!(next(stream).0, Ask::Quiesce(250, _)));
    done(stream);
    let (command, file) = next(stream);
    assert_eq!(command, Ask::SaveRest(rounds, postcopy));
    File::from(file.unwrap()).write_all_at(state, 0).unwrap();
    done(stream);
}

/// Receives the file that accompanies this command, as a worker.
fn is_given(stream: &UnixStream, by: &Ask) -> Vec<u8> {
    let (command, file) = next(stream);
    assert_eq!(command, *by);
    let mut state = Vec::new();
    let mut file = File::from(file.unwrap());
    std::io::Seek::rewind(&mut file).unwrap();
    file.read_to_end(&mut state).unwrap();
    state
}

/// A worker that takes over an application, and its attachment.
fn taken_up(pool: &UnixListener) -> (UnixStream, Attachment) {
    let (stream, _) = pool.accept().unwrap();
    let mut bytes = [0; ATTACHMENT];
    let files = socket::receive_exact(&stream, &mut bytes).unwrap();
    assert_eq!(files.len(), 4);
    (stream, Attachment::from_bytes(&bytes).unwrap())
}

/// The state that a worker receives; `charged`: its memory is already in the account.
fn restores_as(stream: &UnixStream, charged: bool) -> Vec<u8> {
    is_given(stream, &Ask::Restore(charged))
}

fn restores(stream: &UnixStream) -> Vec<u8> {
    restores_as(stream, true)
}

/// Replies as a worker that is told to resume although it has not stopped.
fn goes_on_though_it_serves(stream: &UnixStream) {
    assert_eq!(next(stream).0, Ask::Resume());
    refuse(stream, "somebody else moves it");
}

fn ends(mut stream: &UnixStream) {
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
}

#[test]
fn an_application_goes_on_with_another_pools_worker_and_those_that_come_are_served_there() {
    let (rig, other) = (rig(), other());
    let old = rig.open(1);
    let moved = rig.start_move(None, &other.path);
    let large = vec![1; 2 << 20];
    let first = large.clone();
    let old = thread::spawn(move || {
        precopies(&old, 0, &first);
        precopies(&old, 1, b"second");
        saves_rest(&old, 2, b"state");
        assert_eq!(next(&old).0, Ask::Leave());
        done(&old);
        ends(&old);
    });
    let (new, attachment) = taken_up(&other.pool);
    assert!(attachment.takes_up);
    assert_eq!((attachment.slice, &*attachment.device), (1, "other"));
    done(&new);
    for round in [&large[..], b"second"] {
        assert!(is_given(&new, &Ask::Prepare(true)) == round);
        done(&new);
    }
    assert_eq!(restores(&new), b"state");
    done(&new);
    assert_eq!(next(&new).0, Ask::Go());
    old.join().unwrap();
    let moved = moved.recv().unwrap();
    assert_eq!((moved.slices, moved.reasons), (vec![1], Vec::new()));
    assert_eq!(rig.state(1), State::Open);
    rig.command(0, Command::Open);
    let (mut next, attachment) = taken_up(&other.pool);
    assert!(!attachment.takes_up);
    next.write_all(&[READY]).unwrap();
    rig.becomes(0, State::Open);
    rig.command(1, Command::Close);
    ends(&new);
    drop(new);
    rig.becomes(1, State::Free);
}

#[test]
fn an_application_that_the_other_pool_refuses_stays_and_goes_on() {
    let (rig, other) = (rig(), other());
    let old = rig.open(2);
    let moved = rig.start_move(None, &other.path);
    let old = thread::spawn(move || {
        precopies(&old, 0, b"round");
        saves_rest(&old, 1, b"state");
        assert_eq!(next(&old).0, Ask::Resume());
        done(&old);
        old
    });
    let (new, _) = taken_up(&other.pool);
    done(&new);
    is_given(&new, &Ask::Prepare(true));
    done(&new);
    restores(&new);
    refuse(&new, "it has no such device");
    let old = old.join().unwrap();
    let moved = moved.recv().unwrap();
    assert_eq!(moved.slices, Vec::<u32>::new());
    assert!(moved.reasons[0].contains("slice 2"), "{moved:?}");
    assert!(moved.reasons[0].contains("no such device"), "{moved:?}");
    assert_eq!(rig.state(2), State::Open);
    ends(&new);
    // Future applications are served by the first pool.
    let _first = rig.open(0);
    rig.command(2, Command::Close);
    ends(&old);
    drop(old);
    rig.becomes(2, State::Free);
}

#[test]
fn a_worker_that_ends_when_another_one_has_its_state_is_not_missed() {
    let (rig, other) = (rig(), other());
    let old = rig.open(1);
    let moved = rig.start_move(Some(1), &other.path);
    let old = thread::spawn(move || {
        does_not_precopy(&old);
        saves_rest(&old, 0, b"state");
        assert_eq!(next(&old).0, Ask::Leave());
    });
    let (new, _) = taken_up(&other.pool);
    done(&new);
    restores(&new);
    done(&new);
    assert_eq!(next(&new).0, Ask::Go());
    old.join().unwrap();
    assert_eq!(moved.recv().unwrap().slices, [1]);
    assert_eq!(rig.state(1), State::Open);
}

#[test]
fn a_worker_that_dies_while_it_is_saved_costs_its_application_an_error() {
    let (rig, other) = (rig(), other());
    let old = rig.open(0);
    let moved = rig.start_move(Some(0), &other.path);
    let (new, _) = taken_up(&other.pool);
    done(&new);
    does_not_precopy(&old);
    assert!(matches!(next(&old).0, Ask::Quiesce(250, _)));
    drop(old);
    let moved = moved.recv().unwrap();
    assert!(moved.reasons[0].contains("has ended"), "{moved:?}");
    rig.becomes(0, State::Ended);
    ends(&new);
}

#[test]
fn a_slice_that_the_guest_closes_meanwhile_is_free_again() {
    let (rig, other) = (rig(), other());
    let old = rig.open(0);
    let moved = rig.start_move(Some(0), &other.path);
    let (new, _) = taken_up(&other.pool);
    done(&new);
    does_not_precopy(&old);
    assert!(matches!(next(&old).0, Ask::Quiesce(250, _)));
    rig.command(0, Command::Close);
    ends(&old);
    drop(old);
    assert!(moved.recv().unwrap().slices.is_empty());
    rig.becomes(0, State::Free);
    ends(&new);
    let _next = rig.open(0);
}

#[test]
fn a_pool_that_is_not_there_and_a_slice_without_application_are_reported() {
    let rig = rig();
    let nowhere = std::path::Path::new("/nonexistent/pool");
    let moved = rig.start_move(None, nowhere).recv().unwrap();
    assert!(moved.reasons[0].contains("/nonexistent/pool"), "{moved:?}");
    let _worker = rig.open(3);
    let moved = rig.start_move(Some(1), nowhere).recv().unwrap();
    assert!(moved.reasons[0].contains("slice 1"), "{moved:?}");
    let moved = rig.start_move(None, nowhere).recv().unwrap();
    assert!(moved.reasons[0].contains("slice 3"), "{moved:?}");
    assert_eq!(rig.state(3), State::Open);
}

#[test]
fn a_port_that_is_taken_away_ends_a_move() {
    let (rig, other) = (rig(), other());
    let old = rig.open(0);
    let moved = rig.start_move(None, &other.path);
    let (new, _) = taken_up(&other.pool);
    done(&new);
    does_not_precopy(&old);
    assert!(matches!(next(&old).0, Ask::Quiesce(250, _)));
    rig.segment.unplug(rig.bdf).unwrap();
    ends(&old);
    drop(old);
    assert!(!moved.recv().unwrap().reasons.is_empty());
    ends(&new);
    let moved = rig.start_move(None, &other.path).recv().unwrap();
    assert!(moved.reasons[0].contains("not plugged in"), "{moved:?}");
    let _ = new.as_fd();
}

/// A byte of a slice, through the guest's mapping.
fn byte(rig: &Rig, slice: u64, offset: usize) -> *mut u8 {
    let (_, base, _) = rig.space.window();
    (base as *mut u8).wrapping_add((slice * SMALLEST) as usize + offset)
}

#[test]
fn a_saved_port_has_its_applications_which_go_on_in_another_machine() {
    let rig = rig();
    let old = rig.open(1);
    rig.write(registers::OWNER + 4 * 2, user_to_number(Some(7)));
    rig.command(2, Command::Open);
    let (_asked, ..) = rig.attached();
    // SAFETY: within the window.
    unsafe { byte(&rig, 1, 4321).write_volatile(9) };
    let changes = rig.read(registers::CHANGES);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("archive");
    let worker = thread::spawn(move || {
        saves(&old, b"state");
        assert_eq!(next(&old).0, Ask::Resume());
        done(&old);
        old
    });
    let mut archive = Archive::new(File::create(&path).unwrap());
    let stopped = rig.save(&mut archive).ok().unwrap();
    let state = rig.function.lock().unwrap().save().unwrap();
    drop(stopped);
    // The first VM continues, and a further save must not include the applications.
    let old = worker.join().unwrap();
    assert_eq!(rig.state(1), State::Open);
    assert!(rig.function.lock().unwrap().save().is_err());
    rig.command(1, Command::Close);
    ends(&old);

    let pool = UnixListener::bind(folder.path().join("pool")).unwrap();
    let workers = pool.try_clone().unwrap();
    let workers = thread::spawn(move || {
        // The slice that was being opened gets a worker as usual, before or after the others.
        let (mut new, mut attachment) = taken_up(&workers);
        let mut early = None;
        if !attachment.takes_up {
            let other = taken_up(&workers);
            early = Some((mem::replace(&mut new, other.0), attachment));
            attachment = other.1;
        }
        assert_eq!((attachment.slice, attachment.takes_up), (1, true));
        done(&new);
        assert_eq!(restores_as(&new, false), b"state");
        done(&new);
        let (asked, attachment) = early.unwrap_or_else(|| taken_up(&workers));
        let about = (attachment.slice, attachment.takes_up, attachment.user);
        assert_eq!(about, (2, false, Some(7)));
        (new, asked)
    });
    let archive = Arc::new(File::open(&path).unwrap());
    let options = Options {
        archive: Some(Arc::clone(&archive)),
        ..options(folder.path())
    };
    let again = rig_of(folder, pool, options, Some(state));
    assert_eq!(Arc::strong_count(&archive), 1, "it is not kept");
    let port = again.function.lock().unwrap().handle();
    assert!(port.has_images());
    port.take_up(&Patience::within(LONG)).unwrap();
    let (new, _asked) = workers.join().unwrap();
    assert_eq!(again.state(1), State::Open);
    assert_eq!(again.read(registers::CHANGES), changes);
    // SAFETY: within the window.
    assert_eq!(unsafe { byte(&again, 1, 4321).read_volatile() }, 9);
    again.function.lock().unwrap().resume().unwrap();
    assert_eq!(next(&new).0, Ask::Go());
    again.command(1, Command::Close);
    ends(&new);
    drop(new);
    again.becomes(1, State::Free);
}

#[test]
fn applications_that_cannot_be_saved_are_all_named_and_go_on() {
    let rig = rig();
    let workers = [0, 3].map(|slice| rig.open(slice));
    let workers = workers.map(|worker| {
        thread::spawn(move || {
            assert!(matches!(next(&worker).0, Ask::Quiesce(250, _)));
            refuse(&worker, "it has shared virtual memory");
            goes_on_though_it_serves(&worker);
            worker
        })
    });
    let Err(Error::Stays(reasons)) = rig.stop(Patience::within(LONG)) else {
        panic!("they have stopped");
    };
    assert_eq!(reasons.len(), 2);
    assert!(reasons[0].contains("slice 0"), "{reasons:?}");
    assert!(reasons[1].contains("slice 3"), "{reasons:?}");
    assert!(reasons[1].contains("shared virtual"), "{reasons:?}");
    for (slice, worker) in [0, 3].into_iter().zip(workers) {
        let worker = worker.join().unwrap();
        assert_eq!(rig.state(slice), State::Open);
        rig.command(slice, Command::Close);
        ends(&worker);
        drop(worker);
        rig.becomes(slice, State::Free);
    }
}

#[test]
fn a_state_with_applications_is_nothing_without_its_archive_or_with_a_damaged_one() {
    let rig = rig();
    let old = rig.open(0);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("archive");
    let worker = thread::spawn(move || {
        saves(&old, b"state");
        next(&old);
        done(&old);
        old
    });
    let mut archive = Archive::new(File::create(&path).unwrap());
    let stopped = rig.save(&mut archive).ok().unwrap();
    let state = rig.function.lock().unwrap().save().unwrap();
    drop(stopped);
    let _old = worker.join().unwrap();
    let restored = |archive: Option<Arc<File>>| {
        let resources = rig.function.lock().unwrap().resources.clone();
        let restore = || {
            let options = Options {
                archive: archive.clone(),
                ..options(folder.path())
            };
            let mut port = Accel::new(options, resources.clone()).unwrap();
            port.restore(state.clone()).map(|()| port)
        };
        match restore() {
            Err(refused) => base::Chain(&refused).to_string(),
            Ok(mut port) => {
                // The port does not run without its applications.
                assert!(port.resume().is_err());
                let port = restore().unwrap().handle();
                port.take_up(&Patience::within(LONG)).unwrap_err()
            }
        }
    };
    let refused = |archive, why: &str| {
        let text = restored(archive);
        assert!(text.contains(why), "{text}");
    };
    refused(None, "not there");
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let file = Arc::new(file);
    // Nobody listens, and the archive is valid.
    refused(Some(Arc::clone(&file)), "does not answer");
    file.write_all_at(b"x", 1).unwrap();
    refused(Some(Arc::clone(&file)), "damaged");
    file.set_len(4096).unwrap();
    refused(Some(file), "truncated");
}

#[test]
fn all_applications_are_asked_to_stop_before_the_first_has_answered() {
    let rig = rig();
    let workers = [0, 1, 3].map(|slice| rig.open(slice));
    let asked = thread::spawn(move || {
        for worker in &workers {
            assert!(matches!(next(worker).0, Ask::Quiesce(250, _)));
        }
        // In another order.
        for worker in workers.iter().rev() {
            done(worker);
        }
        workers
    });
    let standing = rig.stop(Patience::within(LONG)).ok().unwrap();
    let workers = asked.join().unwrap();
    drop(standing);
    for worker in &workers {
        assert_eq!(next(worker).0, Ask::Resume());
        done(worker);
    }
    // All are returned to the port one after the other.
    rig.eventually(|| rig.lendable() == 3);
}

#[test]
fn a_wait_that_is_given_up_ends_at_once_and_its_applications_go_on() {
    let rig = rig();
    let [slow, ready] = [0, 2].map(|slice| rig.open(slice));
    let cancel = Cancel::default();
    let patience = Patience::new(LONG, cancel.clone());
    assert_eq!(rig.lendable(), 2);
    thread::scope(|scope| {
        let stop = scope.spawn(|| rig.stop(patience));
        assert!(matches!(next(&ready).0, Ask::Quiesce(250, _)));
        done(&ready);
        assert!(matches!(next(&slow).0, Ask::Quiesce(250, _)));
        cancel.cancel();
        let Err(Error::Stays(reasons)) = stop.join().unwrap() else {
            panic!("they have stopped");
        };
        assert!(reasons[0].contains("slice 0"), "{reasons:?}");
        assert!(reasons[0].contains("cancelled"), "{reasons:?}");
    });
    assert_eq!(next(&ready).0, Ask::Resume());
    done(&ready);
    // Its late reply is not taken for another one.
    done(&slow);
    assert_eq!(next(&slow).0, Ask::Resume());
    done(&slow);
    rig.eventually(|| rig.lendable() == 2);
    for (slice, worker) in [(0, slow), (2, ready)] {
        assert_eq!(rig.state(slice), State::Open);
        rig.command(slice, Command::Close);
        ends(&worker);
        drop(worker);
        rig.becomes(slice, State::Free);
    }
}

#[test]
fn a_save_that_is_given_up_leaves_its_application() {
    let rig = rig();
    let old = rig.open(1);
    let cancel = Cancel::default();
    thread::scope(|scope| {
        let stop = scope.spawn(|| {
            let standing = rig.stop(Patience::new(LONG, cancel.clone()))?;
            standing.save(&mut Archive::new(tempfile::tempfile().unwrap()))
        });
        assert!(matches!(next(&old).0, Ask::Quiesce(250, _)));
        done(&old);
        assert_eq!(next(&old).0, Ask::Save());
        cancel.cancel();
        assert!(stop.join().unwrap().is_err());
    });
    done(&old);
    assert_eq!(next(&old).0, Ask::Resume());
    done(&old);
    rig.eventually(|| rig.lendable() == 1);
    assert_eq!(rig.state(1), State::Open);
}

#[test]
fn a_worker_that_dies_when_it_is_to_go_on_costs_its_application_an_error() {
    let rig = rig();
    let old = rig.open(1);
    let worker = thread::spawn(move || {
        assert!(matches!(next(&old).0, Ask::Quiesce(250, _)));
        done(&old);
        assert_eq!(next(&old).0, Ask::Resume());
    });
    drop(rig.stop(Patience::within(LONG)).ok().unwrap());
    worker.join().unwrap();
    rig.becomes(1, State::Ended);
}

#[test]
fn a_move_that_is_given_up_leaves_its_applications() {
    let (rig, other) = (rig(), other());
    let workers = [0, 1].map(|slice| rig.open(slice));
    let cancel = Cancel::default();
    let moved = rig.start_move_until(None, &other.path, cancel.clone());
    let (new, _) = taken_up(&other.pool);
    // Its driver responds late.
    cancel.cancel();
    let moved = moved.recv().unwrap();
    assert!(moved.slices.is_empty());
    assert_eq!(moved.reasons.len(), 2);
    assert!(moved.reasons[0].contains("cancelled"), "{moved:?}");
    ends(&new);
    rig.eventually(|| rig.lendable() == 2);
    drop(workers);
}
