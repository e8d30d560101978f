//! Applications that change their workers.

use std::{
    fs::File,
    io::Read,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::FileExt,
    },
    path::PathBuf,
    sync::mpsc,
    thread,
};

use gantry_remoting::{
    link::control::{self, Command as Ask, Reply},
    wire::Blob,
};

use super::{
    super::{
        moving::{Move, Moved},
        saved::{Archive, Error},
    },
    *,
};

/// A pool beside the port's own.
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
    fn start_move(&self, slice: Option<u32>, socket: &std::path::Path) -> mpsc::Receiver<Moved> {
        let port = self.function.lock().unwrap().handle();
        let (told, moved) = mpsc::channel();
        let asked = Move {
            slice,
            to: Pool {
                socket: socket.to_owned(),
                device: "other".to_owned(),
            },
            drain: Duration::from_millis(250),
        };
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

/// What a worker does that stops, and saves this.
fn saves(stream: &UnixStream, state: &[u8]) {
    assert_eq!(next(stream).0, Ask::Quiesce(250));
    done(stream);
    let (command, file) = next(stream);
    assert_eq!(command, Ask::Save());
    File::from(file.unwrap()).write_all_at(state, 0).unwrap();
    done(stream);
}

/// A worker that takes an application up, and what it is told.
fn taken_up(pool: &UnixListener) -> (UnixStream, Attachment) {
    let (stream, _) = pool.accept().unwrap();
    let mut bytes = [0; ATTACHMENT];
    let files = socket::receive_exact(&stream, &mut bytes).unwrap();
    assert_eq!(files.len(), 4);
    (stream, Attachment::from_bytes(&bytes).unwrap())
}

/// The state that a worker is given, whose memory is in the account already or is not.
fn restores_as(stream: &UnixStream, charged: bool) -> Vec<u8> {
    let (command, file) = next(stream);
    assert_eq!(command, Ask::Restore(charged));
    let mut state = Vec::new();
    let mut file = File::from(file.unwrap());
    std::io::Seek::rewind(&mut file).unwrap();
    file.read_to_end(&mut state).unwrap();
    state
}

fn restores(stream: &UnixStream) -> Vec<u8> {
    restores_as(stream, true)
}

fn ends(mut stream: &UnixStream) {
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
}

#[test]
fn an_application_goes_on_with_another_pools_worker_and_those_that_come_are_served_there() {
    let (rig, other) = (rig(), other());
    let old = rig.open(1);
    let moved = rig.start_move(None, &other.path);
    let old = thread::spawn(move || {
        saves(&old, b"state");
        ends(&old);
    });
    let (new, attachment) = taken_up(&other.pool);
    assert!(attachment.takes_up);
    assert_eq!((attachment.slice, &*attachment.device), (1, "other"));
    done(&new);
    assert_eq!(restores(&new), b"state");
    done(&new);
    // The first one has ended by then.
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
        saves(&old, b"state");
        assert_eq!(next(&old).0, Ask::Resume());
        done(&old);
        old
    });
    let (new, _) = taken_up(&other.pool);
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
    // Those that come are served by the first pool.
    let _first = rig.open(0);
    rig.command(2, Command::Close);
    ends(&old);
    drop(old);
    rig.becomes(2, State::Free);
}

#[test]
fn a_worker_that_dies_while_it_is_saved_costs_its_application_an_error() {
    let (rig, other) = (rig(), other());
    let old = rig.open(0);
    let moved = rig.start_move(Some(0), &other.path);
    let (new, _) = taken_up(&other.pool);
    done(&new);
    assert_eq!(next(&old).0, Ask::Quiesce(250));
    drop(old);
    let moved = moved.recv().unwrap();
    assert!(moved.reasons[0].contains("does not answer"), "{moved:?}");
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
    assert_eq!(next(&old).0, Ask::Quiesce(250));
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
    assert_eq!(next(&old).0, Ask::Quiesce(250));
    rig.segment.unplug(rig.bdf).unwrap();
    ends(&old);
    drop(old);
    assert!(!moved.recv().unwrap().reasons.is_empty());
    ends(&new);
    let moved = rig.start_move(None, &other.path).recv().unwrap();
    assert!(moved.reasons[0].contains("not plugged in"), "{moved:?}");
    let _ = new.as_fd();
}

/// A byte of a slice, as the guest sees it.
fn byte(rig: &Rig, slice: u64, offset: usize) -> *mut u8 {
    let (_, base, _) = rig.space.0.lock().unwrap().unwrap();
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
    let port = rig.function.lock().unwrap().handle();
    let mut archive = Archive::new(File::create(&path).unwrap());
    let stopped = port
        .save(&mut archive, Duration::from_millis(250))
        .ok()
        .unwrap();
    let state = rig.function.lock().unwrap().save().unwrap();
    drop(stopped);
    // The first machine goes on, and is not saved in passing.
    let old = worker.join().unwrap();
    assert_eq!(rig.state(1), State::Open);
    assert!(rig.function.lock().unwrap().save().is_err());
    rig.command(1, Command::Close);
    ends(&old);

    let pool = UnixListener::bind(folder.path().join("pool")).unwrap();
    let workers = pool.try_clone().unwrap();
    let workers = thread::spawn(move || {
        let (new, attachment) = taken_up(&workers);
        assert_eq!((attachment.slice, attachment.takes_up), (1, true));
        done(&new);
        assert_eq!(restores_as(&new, false), b"state");
        done(&new);
        // The one that was being opened gets a worker like any other.
        let (asked, attachment) = taken_up(&workers);
        let about = (attachment.slice, attachment.takes_up, attachment.user);
        assert_eq!(about, (2, false, Some(7)));
        (new, asked)
    });
    let options = Options {
        archive: Some(Arc::new(File::open(&path).unwrap())),
        ..options(folder.path())
    };
    let again = rig_of(folder, pool, options, Some(state));
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
            assert_eq!(next(&worker).0, Ask::Quiesce(250));
            refuse(&worker, "it has shared virtual memory");
            worker
        })
    });
    let port = rig.function.lock().unwrap().handle();
    let mut archive = Archive::new(tempfile::tempfile().unwrap());
    let refused = port.save(&mut archive, Duration::from_millis(250));
    let Err(Error::Stays(reasons)) = refused else {
        panic!("they were saved");
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
    let port = rig.function.lock().unwrap().handle();
    let mut archive = Archive::new(File::create(&path).unwrap());
    let stopped = port
        .save(&mut archive, Duration::from_millis(250))
        .ok()
        .unwrap();
    let state = rig.function.lock().unwrap().save().unwrap();
    drop(stopped);
    let _old = worker.join().unwrap();
    let restored = |archive: Option<Arc<File>>| {
        let resources = rig.function.lock().unwrap().resources.clone();
        let options = Options {
            archive,
            ..options(folder.path())
        };
        let refused = Accel::new(options, resources)
            .unwrap()
            .restore(state.clone());
        base::Chain(&refused.unwrap_err()).to_string()
    };
    let refused = |archive, why: &str| {
        let text = restored(archive);
        assert!(text.contains(why), "{text}");
    };
    refused(None, "not there");
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let file = Arc::new(file);
    // Nobody listens, and the archive is good.
    refused(Some(Arc::clone(&file)), "does not answer");
    file.write_all_at(b"x", 1).unwrap();
    refused(Some(Arc::clone(&file)), "damaged");
    file.set_len(4096).unwrap();
    refused(Some(file), "truncated");
}
