//! Applications of a migrating VM, copied in rounds while they run.

use super::{
    super::super::{
        rounds::{Copied, CopiedPort},
        saved::SavedSlice,
    },
    *,
};

/// Copies a round of a VM's applications.
fn copied(copies: &mut Copied) -> (Vec<CopiedPort>, File) {
    let mut archive = Archive::new(tempfile::tempfile().unwrap());
    let ports = copies.round(&mut archive, &Patience::within(LONG));
    (ports.ok().unwrap(), archive.file().try_clone().unwrap())
}

/// A port whose workers take over applications that have yet to arrive.
fn standing_by(pool: &Other, rig: &Rig) -> Accel {
    let options = Options {
        socket: pool.path.clone(),
        ..options(pool._folder.path())
    };
    let resources = rig.function.lock().unwrap().resources.clone();
    let port = Accel::new(options, resources).unwrap();
    port.stand_by().unwrap();
    port
}

/// A worker at the destination that has received the first round of an application.
fn first_round(
    there: &Accel,
    pool: &Other,
    (ports, archive): &(Vec<CopiedPort>, File),
) -> UnixStream {
    let port = there.handle();
    thread::scope(|scope| {
        let slices = &ports[0].slices;
        let patience = Patience::within(LONG);
        let prepared = scope.spawn(move || port.prepare(slices, archive, &patience));
        let (new, attachment) = taken_up(&pool.pool);
        assert!(attachment.takes_up);
        done(&new);
        assert_eq!(is_given(&new, &Ask::Prepare(false)), b"first");
        done(&new);
        prepared.join().unwrap().unwrap();
        new
    })
}

/// Acts as a worker that is copied in a round while it serves.
fn copies(stream: &UnixStream, round: u32, state: &[u8]) {
    let (command, file) = next(stream);
    assert_eq!(command, Ask::Precopy(round, 30_000));
    File::from(file.unwrap()).write_all_at(state, 0).unwrap();
    done(stream);
}

#[test]
fn an_application_that_was_copied_while_it_went_on_leaves_little_to_save() {
    let (rig, pool) = (rig(), other());
    let mut there = standing_by(&pool, &rig);
    let old = rig.open(1);
    // SAFETY: within the window.
    unsafe { byte(&rig, 1, 4321).write_volatile(9) };
    // SAFETY: within the window.
    unsafe { byte(&rig, 1, 200_000).write_volatile(7) };
    let worker = thread::spawn(move || {
        copies(&old, 0, b"first");
        copies(&old, 1, b"second");
        saves_rest(&old, 2, b"rest");
        old
    });
    let mut copies = Copied::new(rig.ports());
    let round = copied(&mut copies);
    assert_eq!(rig.lendable(), 1, "it is the port's own between rounds");
    let new = first_round(&there, &pool, &round);
    // SAFETY: within the window.
    unsafe { byte(&rig, 1, 4321).write_volatile(0) };
    let (ports, archive) = copied(&mut copies);
    let again = &ports[0].slices[0];
    assert_eq!((again.slice, again.rounds), (1, 2));
    let port = there.handle();
    thread::scope(|scope| {
        let patience = Patience::within(LONG);
        let (slices, archive) = (&ports[0].slices, &archive);
        let prepared = scope.spawn(move || port.prepare(slices, archive, &patience));
        assert_eq!(is_given(&new, &Ask::Prepare(false)), b"second");
        done(&new);
        prepared.join().unwrap().unwrap();
    });
    let mut archive = Archive::new(tempfile::tempfile().unwrap());
    let standing = rig.stop(Patience::within(LONG)).ok().unwrap();
    let stopped = standing.after(copies).save(&mut archive).ok().unwrap();
    let state = rig.function.lock().unwrap().save().unwrap();
    let blocks = std::os::unix::fs::MetadataExt::blocks(&archive.file().metadata().unwrap());
    assert!(blocks < 64, "nothing but what is new is saved: {blocks}");
    stopped.end();
    let old = worker.join().unwrap();
    ends(&old);
    there.set_archive(Some(Arc::new(archive.file().try_clone().unwrap())));
    there.restore(state).unwrap();
    let port = there.handle();
    assert!(port.has_images());
    thread::scope(|scope| {
        let taken = scope.spawn(|| port.take_up(&Patience::within(LONG)));
        assert_eq!(restores_as(&new, false), b"rest");
        done(&new);
        taken.join().unwrap().unwrap();
    });
    let window = port.window(1).unwrap();
    let mut bytes = [0; 2];
    window.read_exact_at(&mut bytes[..1], 4321).unwrap();
    window.read_exact_at(&mut bytes[1..], 200_000).unwrap();
    assert_eq!(bytes, [0, 7]);
}

#[test]
fn what_was_made_since_the_last_copy_is_counted_of_those_that_can_be_copied() {
    let rig = rig();
    let (busy, copied_before) = (rig.open(0), rig.open(1));
    let mut copies = Copied::new(rig.ports());
    thread::scope(|scope| {
        scope.spawn(|| does_not_precopy(&busy));
        scope.spawn(|| self::copies(&copied_before, 0, b"first"));
        scope.spawn(|| copied(&mut copies)).join().unwrap();
    });
    assert_eq!(next(&busy).0, Ask::Resume());
    done(&busy);
    rig.eventually(|| rig.lendable() == 2);
    let come_since = [rig.open(2), rig.open(3)];
    let examined = |stream: &UnixStream, reply: Reply| {
        assert_eq!(next(stream).0, Ask::Examine());
        control::send(stream, &reply, &[]).unwrap();
    };
    let made = thread::scope(|scope| {
        scope.spawn(|| examined(&copied_before, Reply::Made(5)));
        scope.spawn(|| examined(&come_since[0], Reply::Made(7)));
        // It is busy.
        scope.spawn(|| examined(&come_since[1], Reply::Done()));
        copies.made(&Patience::within(LONG))
    });
    assert_eq!(made, 12);
    assert_eq!(rig.lendable(), 4, "all are the port's own again");
    // One that could not be copied is not asked, because another round would skip it again.
    busy.set_nonblocking(true).unwrap();
    let nothing = (&busy).read(&mut [0]).unwrap_err();
    assert_eq!(nothing.kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn copies_that_are_given_up_are_forgotten_here_and_their_workers_end_there() {
    let (rig, pool) = (rig(), other());
    let there = standing_by(&pool, &rig);
    let old = rig.open(0);
    let worker = thread::spawn(move || {
        copies(&old, 0, b"first");
        goes_on_though_it_serves(&old);
        old
    });
    let mut copies = Copied::new(rig.ports());
    let round = copied(&mut copies);
    let new = first_round(&there, &pool, &round);
    drop(copies);
    let old = worker.join().unwrap();
    rig.eventually(|| rig.lendable() == 1);
    assert_eq!(rig.state(0), State::Open);
    drop(there);
    ends(&new);
    let _ = old;
}

#[test]
fn another_application_in_the_slice_of_one_that_was_copied_begins_anew() {
    let (rig, pool) = (rig(), other());
    let mut there = standing_by(&pool, &rig);
    let old = rig.open(1);
    let mut copies = Copied::new(rig.ports());
    let round = thread::scope(|scope| {
        scope.spawn(|| self::copies(&old, 0, b"first"));
        copied(&mut copies)
    });
    let before = first_round(&there, &pool, &round);
    rig.command(1, Command::Close);
    ends(&old);
    drop(old);
    rig.becomes(1, State::Free);
    rig.write(registers::OWNER + 4, user_to_number(Some(7)));
    rig.write(registers::SLICE_API + 4, ApiId::OpenCl.number());
    let old = rig.open(1);
    // SAFETY: within the window.
    unsafe { byte(&rig, 1, 4321).write_volatile(9) };
    let round = thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(next(&old).0, Ask::Precopy(1, 30_000));
            refuse(&old, "it is moved by somebody else");
            self::copies(&old, 0, b"first");
        });
        copied(&mut copies)
    });
    assert_eq!(round.0[0].slices[0].rounds, 1);
    // The worker with the first round ends before another one starts.
    let ended = thread::spawn(move || ends(&before));
    let new = first_round(&there, &pool, &round);
    ended.join().unwrap();
    let has = |there: &Accel| {
        let (port, mut byte) = (there.handle(), [0]);
        port.window(1)
            .unwrap()
            .read_exact_at(&mut byte, 4321)
            .unwrap();
        (byte[0], port.slices.claim(1))
    };
    let claim = Claim {
        owner: user_to_number(Some(7)),
        api: ApiId::OpenCl.number(),
    };
    assert_eq!(has(&there), (9, claim));
    // An application that has ended when everything is saved leaves nothing to the next one in its
    // slice.
    there.restore(without_applications(&rig)).unwrap();
    assert_eq!(has(&there), (0, Claim::default()));
    assert!(there.handle().has_images(), "its worker is to end");
    let ended = thread::spawn(move || ends(&new));
    there.handle().take_up(&Patience::within(LONG)).unwrap();
    ended.join().unwrap();
    drop(old);
}

#[test]
fn an_application_that_is_busy_in_a_later_round_is_saved_as_a_whole() {
    let rig = rig();
    let old = rig.open(1);
    let worker = thread::spawn(move || {
        copies(&old, 0, b"first");
        assert_eq!(next(&old).0, Ask::Precopy(1, 100));
        thread::sleep(Duration::from_millis(150));
        refuse(&old, "its device is busy");
        // No second round is requested, because it would take as long.
        goes_on_though_it_serves(&old);
        saves(&old, b"all");
        old
    });
    let mut copies = Copied::new(rig.ports());
    assert_eq!(copied(&mut copies).0[0].slices[0].rounds, 1);
    copies.limit = Duration::from_millis(100);
    assert!(copied(&mut copies).0.is_empty(), "it is left out");
    copies
        .wait_for_workers(&Patience::within(LONG))
        .ok()
        .unwrap();
    let mut archive = Archive::new(tempfile::tempfile().unwrap());
    let standing = rig.stop(Patience::within(LONG)).ok().unwrap();
    let stopped = standing.after(copies).save(&mut archive).ok().unwrap();
    let state = rig.function.lock().unwrap().save().unwrap();
    let saved = &state["slices"][0];
    assert!(
        saved["image"].is_object() && saved["rounds"].is_null(),
        "{saved}"
    );
    stopped.end();
    ends(&worker.join().unwrap());
}

#[test]
fn a_worker_that_answers_for_a_round_late_is_waited_for_before_all_stop() {
    let rig = rig();
    let old = rig.open(1);
    let (go, goes) = mpsc::channel();
    let worker = thread::spawn(move || {
        assert_eq!(next(&old).0, Ask::Precopy(0, 100));
        goes.recv().unwrap();
        done(&old);
        goes_on_though_it_serves(&old);
        assert!(matches!(next(&old).0, Ask::Quiesce(250, _)));
        done(&old);
        old
    });
    let mut copies = Copied::new(rig.ports());
    copies.limit = Duration::from_millis(100);
    assert!(copied(&mut copies).0.is_empty());
    let Err(Error::Stays(reasons)) = copies.wait_for_workers(&Patience::within(Duration::ZERO))
    else {
        panic!("nobody has answered");
    };
    assert!(
        reasons[0].contains("gpu: the application of slice 1"),
        "{reasons:?}"
    );
    go.send(()).unwrap();
    copies
        .wait_for_workers(&Patience::within(LONG))
        .ok()
        .unwrap();
    let _standing = rig.stop(Patience::within(LONG)).ok().unwrap();
    let _old = worker.join().unwrap();
}

#[test]
fn an_application_whose_worker_cuts_its_copy_short_is_left_out_alone() {
    let rig = rig();
    let workers = [0, 3].map(|slice| rig.open(slice));
    let workers = thread::spawn(move || {
        let [cuts, other] = &workers;
        let (command, file) = next(cuts);
        assert_eq!(command, Ask::Precopy(0, 30_000));
        // No archive has room for this much.
        File::from(file.unwrap()).set_len(1 << 47).unwrap();
        done(cuts);
        copies(other, 0, b"first");
        goes_on_though_it_serves(cuts);
        workers
    });
    let mut copies = Copied::new(rig.ports());
    let (ports, archive) = copied(&mut copies);
    let slices = &ports[0].slices;
    assert_eq!(slices.iter().map(|one| one.slice).collect::<Vec<_>>(), [3]);
    let image = tempfile::tempfile().unwrap();
    slices[0].image.unwrap().read(&archive, &image).unwrap();
    let _workers = workers.join().unwrap();
}

/// The state of a port that its applications have left.
fn without_applications(rig: &Rig) -> serde_json::Value {
    let port = rig.function.lock().unwrap().handle();
    *port.saved() = Some(Vec::new());
    rig.function.lock().unwrap().save().unwrap()
}

#[test]
fn rounds_out_of_order_and_a_rest_without_them_are_refused() {
    let (rig, pool) = (rig(), other());
    let mut there = standing_by(&pool, &rig);
    let old = rig.open(1);
    let mut copies = Copied::new(rig.ports());
    let (ports, archive) = thread::scope(|scope| {
        scope.spawn(|| self::copies(&old, 0, b"first"));
        copied(&mut copies)
    });
    let patience = Patience::within(LONG);
    let later = SavedSlice {
        rounds: 2,
        ..ports[0].slices[0].clone()
    };
    let prepare = |slices: &[SavedSlice]| there.handle().prepare(slices, &archive, &patience);
    let refused = prepare(std::slice::from_ref(&later)).unwrap_err();
    assert!(refused.contains("follow"), "{refused}");
    let first = &ports[0].slices[0];
    let refused = prepare(&[first.clone(), first.clone()]).unwrap_err();
    assert!(refused.contains("slice 1 twice"), "{refused}");
    let many: Vec<_> = (0..65).map(|_| later.clone()).collect();
    assert!(prepare(&many).is_err());
    let nowhere = SavedSlice {
        slice: 99,
        ..ports[0].slices[0].clone()
    };
    assert!(prepare(&[nowhere]).is_err());
    let state = without_applications(&rig);
    let archive = Arc::new(archive.try_clone().unwrap());
    let mut restore = |slices: &[&SavedSlice]| {
        let mut state = state.clone();
        state["slices"] = serde_json::to_value(slices).unwrap();
        there.set_archive(Some(Arc::clone(&archive)));
        let refused = there.restore(state).unwrap_err();
        base::Chain(&refused).to_string()
    };
    let refused = restore(&[&later]);
    assert!(refused.contains("nothing has come before"), "{refused}");
    let other = SavedSlice {
        slice: 2,
        ..first.clone()
    };
    let refused = restore(&[first, &other]);
    assert!(refused.contains("one part of the archive"), "{refused}");
    drop(old);
}
