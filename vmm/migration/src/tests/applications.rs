//! Migration of accelerators' applications with their machine, and copies of running ones.

use super::{
    super::{archive, destination::MOST_COPIES},
    *,
};

/// An archive with this content, and more.
pub(super) fn copy(more: &[u8]) -> File {
    let archive = image().unwrap();
    archive.write_all_at(more, 0).unwrap();
    archive.write_all_at(b"copy", 5 << 20).unwrap();
    archive
}

fn progress() -> Progress {
    Progress::new(Direction::Outgoing, "test")
}

pub(super) fn pair() -> (Connection, Connection) {
    let (here, there) = UnixStream::pair().unwrap();
    let end = |stream| Connection::of_unix(stream, progress()).unwrap();
    (end(here), end(there))
}

/// Outcome of a destination that gets this offer, and whose source then acts as given.
fn offered(
    offer: &Offer,
    source: impl FnOnce(&mut Connection) -> Result<()>,
) -> std::result::Result<(), Ended> {
    let (mut here, other) = pair();
    thread::scope(|scope| {
        let received = scope.spawn(|| Destination::new(other, &mut there(), progress()).run());
        let text = serde_json::to_vec(offer).unwrap();
        here.send(Kind::Offer, 0, &text).unwrap();
        here.receive(&[Kind::Prepared], &mut Vec::new()).unwrap();
        // The destination reports why it refuses.
        let _ = source(&mut here);
        drop(here);
        received.join().unwrap()
    })
}

fn send_copy(connection: &mut Connection) -> Result<()> {
    let archive = copy(b"");
    let sent = archive::send(&archive, connection, &progress())?;
    let text = Copy::new(Vec::new(), archive).describe(sent.size).unwrap();
    connection.send(Kind::Copy, 0, &text)?;
    connection.receive(&[Kind::Copy], &mut Vec::new()).map(drop)
}

#[test]
fn copies_are_taken_only_if_they_were_offered_and_not_without_end() {
    let copies = |offer: &Offer, most| {
        let mut taken = 0;
        let ended = offered(offer, |connection| {
            for _ in 0..most {
                send_copy(connection)?;
                taken += 1;
            }
            Ok(())
        });
        let Err(Ended::Failed(error)) = ended else {
            panic!("no machine has come");
        };
        (taken, error.to_string())
    };
    let older = Offer {
        copies: false,
        ..offer()
    };
    let (count, error) = copies(&older, 1);
    assert_eq!(count, 0);
    assert!(error.contains("Copy"), "{error}");
    let (count, error) = copies(&offer(), MOST_COPIES + 1);
    assert_eq!(count, MOST_COPIES);
    assert!(error.contains("Copy"), "{error}");
}

#[test]
fn copies_that_would_end_after_the_time_that_a_migration_has_are_not_made() {
    let copies = |copying, timeout| {
        let (connection, other) = pair();
        let mut owner = Here {
            copying,
            copy_size: 4 << 20,
            files: shared_files(),
            ..here()
        };
        let local = Offer {
            local: true,
            ..offer()
        };
        let wishes = Wishes {
            timeout,
            ..wishes()
        };
        let outcome = thread::scope(|scope| {
            scope.spawn(|| Destination::new(other, &mut there(), progress()).run());
            Source::new(connection, &mut owner, local, wishes, progress(), None).run()
        });
        assert!(matches!(outcome, Outcome::Moved), "{outcome:?}");
        owner.copied.len()
    };
    let hour = Duration::from_secs(3600);
    assert_eq!(copies(Duration::ZERO, hour), 3, "until little is new");
    let long = Duration::from_millis(200);
    assert_eq!(copies(long, long * 3 / 2), 1);
}

#[test]
fn a_guest_that_is_slowed_down_for_its_memory_is_not_while_applications_are_copied() {
    let (connection, mut other) = pair();
    let mut owner = Here {
        throttled: 40,
        ..here()
    };
    let mut contents = Vec::new();
    thread::scope(|scope| {
        scope.spawn(|| {
            while other
                .receive(&[Kind::Archive, Kind::Copy], &mut contents)
                .unwrap()
                .kind
                == Kind::Archive
            {}
            other.send(Kind::Copy, 0, &[]).unwrap();
        });
        let mut source = Source::new(connection, &mut owner, offer(), wishes(), progress(), None);
        source.copy(40).unwrap();
    });
    assert_eq!((owner.copied, owner.throttled), (vec![0], 40));
}

/// Migrates a machine whose applications have allocated `made[n]` bytes of memory after `n` copies. Returns the number
/// of copies, and the value of `most_made` at each attempt to stop them.
fn stopped(made: &[u64], change: fn(&mut Offer)) -> (usize, Vec<u64>) {
    let (connection, other) = pair();
    let mut owner = Here {
        memory: Some(Departing::unwatched(vec![region(0), region(1 << 32)])),
        files: shared_files(),
        made: made.to_vec(),
        ..here()
    };
    let mut offer = offer();
    change(&mut offer);
    let wishes = Wishes {
        // They are asked once, however long that takes.
        downtime: Duration::from_secs(60),
        ..wishes()
    };
    let outcome = thread::scope(|scope| {
        scope.spawn(|| Destination::new(other, &mut there(), progress()).run());
        Source::new(connection, &mut owner, offer, wishes, progress(), None).run()
    });
    assert!(matches!(outcome, Outcome::Moved), "{outcome:?}");
    (owner.copied.len(), owner.most_made)
}

#[test]
fn memory_that_applications_make_after_a_copy_is_copied_before_they_stop() {
    const MUCH: u64 = 256 << 20;
    let all = u64::MAX;
    for local in [false, true] {
        let change: fn(&mut Offer) = match local {
            false => |_| {},
            true => |offer| offer.local = true,
        };
        // Once, whatever comes then.
        let (copies, most) = stopped(&[0, all], change);
        assert_eq!((copies, most.len()), (2, 2));
        assert!(most.iter().all(|most| (1 << 20..=MUCH).contains(most)));
        // Always too much: the number of copies is bounded.
        let (copies, most) = stopped(&[all; 20], change);
        assert_eq!((copies, most.len()), (8, 8));
        assert_eq!(most[7], all);
    }
    // Within the limit; with contents that follow; and without any copy.
    assert_eq!(stopped(&[0, 1 << 20], |_| {}).0, 1);
    assert_eq!(stopped(&[0, all], |offer| offer.postcopy = true).0, 1);
    let (copies, most) = stopped(&[all], |offer| offer.copies = false);
    assert_eq!((copies, most), (0, vec![all]));
}

#[test]
fn workers_may_take_longer_than_the_other_side_may_be_silent() {
    let moved = migrate(&Setup {
        slow: Duration::from_secs(4),
        ..Setup::default()
    });
    assert!(
        matches!(moved.outcome, Outcome::Moved),
        "{:?}",
        moved.outcome
    );
    moved.received.unwrap();
}

#[test]
fn applications_are_taken_only_of_a_machine_that_may_have_some() {
    for change in [(|offer| offer.protocol = 3) as fn(&mut Offer), |offer| {
        offer.config.accels = None
    }] {
        let case = migrate(&Setup {
            change,
            ..Setup::default()
        });
        let Err(Ended::Failed(error)) = case.received else {
            panic!("they were taken: {:?}", case.outcome);
        };
        assert!(error.to_string().contains("Archive"), "{error}");
        assert!(case.source_runs && !case.destination_runs);
    }
}
