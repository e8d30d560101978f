//! Programs that the host has suspended, by a script in place of gantry-checkpoint.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process, thread,
    time::{Duration, Instant},
};

use remoting_proto::port::{Outcome, OutcomeKind, Server, State, Wish};

use super::{HANGS, Host, Other, Program, Rig, Told, command};

/// Notes its words, refuses if there is a reason, and keeps the journal as the program does.
const SCRIPT: &str = r#"#!/bin/sh
unset LD_PRELOAD
cd "${0%/*}"
echo "$*" >>calls
[ ! -e slow ] || echo "gantry-checkpoint: PID 7 (x) is being suspended, 2 s so far" >&2
while [ -e slow ]; do sleep 0.02; done
case "$*" in
resume*) [ ! -e broken ] && rm -rf suspended && exit 0;;
*) [ ! -e refuse ] && mkdir -p suspended && touch suspended/1 && exit 0;;
esac
echo "gantry-checkpoint: it takes long" >&2
echo "gantry-checkpoint: nothing was changed: $(cat refuse broken 2>/dev/null)" >&2
exit 1
"#;

struct Suspensions {
    rig: Rig,
    number: u8,
}

impl Suspensions {
    fn new(has_interrupts: bool, prepare: impl FnOnce(PathBuf)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("gantry-checkpoint");
        fs::write(&script, SCRIPT).unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        prepare(folder.path().to_owned());
        Self {
            rig: Rig::with_folder(has_interrupts, folder),
            number: 0,
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.rig.folder.path().join(name)
    }

    fn host(&self) -> &Host {
        &self.rig.host
    }

    fn wish(&mut self, by: Server) {
        self.number += 1;
        let number = self.number;
        self.set(Some(Wish { number, by }));
    }

    fn set(&self, wish: Option<Wish>) {
        *self.host().wish.lock().unwrap() = wish;
        self.host().events.interrupt();
    }

    /// What has become of the last wish, which the agent says to have begun: twice if something else was under way.
    fn outcome(&self) -> (OutcomeKind, u16, String) {
        let next = || {
            let (outcome, reason) = self.rig.outcomes.recv_timeout(HANGS).unwrap();
            let Outcome {
                number,
                kind,
                applications,
            } = outcome;
            assert_eq!(number, self.number);
            (kind, applications, reason)
        };
        let begun = (OutcomeKind::Begun, 0, String::new());
        assert_eq!(next(), begun);
        match next() {
            again if again == begun => next(),
            outcome => outcome,
        }
    }

    fn calls(&self) -> Vec<String> {
        let text = fs::read_to_string(self.file("calls")).unwrap_or_default();
        let journal = format!(" --journal {}", self.file("suspended").display());
        text.lines()
            .map(|line| line.replace(&journal, ""))
            .collect()
    }

    fn wait_until_resumed(&self) {
        let since = Instant::now();
        while self.file("suspended").exists() {
            assert!(since.elapsed() < HANGS, "{:?}", self.calls());
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn wait_for_calls(&self, count: usize) -> Vec<String> {
        let since = Instant::now();
        while self.calls().len() < count {
            assert!(since.elapsed() < HANGS, "{:?}", self.calls());
            thread::sleep(Duration::from_millis(5));
        }
        self.calls()
    }
}

fn done(programs: u16) -> (OutcomeKind, u16, String) {
    (OutcomeKind::Done, programs, String::new())
}

#[test]
fn suspended_programs_need_no_slice_and_those_that_come_wait() {
    for has_interrupts in [true, false] {
        let mut all = Suspensions::new(has_interrupts, |_| {});
        let program = all.rig.program();
        let (number, _, file) = program.open();
        all.wish(Server::Parked);
        let own = process::id();
        let suspend = format!("suspend --released {own}");
        assert_eq!(all.wait_for_calls(1)[0], suspend);
        // The driver closes them.
        drop(file);
        all.rig.wait_for(&Told::Close(number));
        assert!(program.take().is_none(), "it is disconnected");
        all.rig.wait_for(&Told::SliceClosed);
        assert_eq!(all.outcome(), done(1));
        let waiting = all.rig.connect();
        all.wish(Server::Parked);
        assert_eq!(all.outcome(), done(1));
        assert_eq!(
            all.host().state.load(super::Ordering::SeqCst),
            State::Free as u32
        );
        // As for a VM that was restored.
        all.set(None);
        assert_eq!(waiting.hello().0.result, 0, "it is served");
        assert_eq!(all.wait_for_calls(2), [suspend, "resume --all".to_owned()]);
        all.rig.wait_for(&Told::Opened);
    }
}

#[test]
fn programs_are_resumed_as_the_host_wishes() {
    let mut all = Suspensions::new(true, |_| {});
    let program = all.rig.program();
    all.wish(Server::Host);
    assert_eq!(all.outcome(), done(0));
    all.wish(Server::Parked);
    assert_eq!(all.outcome(), done(1));
    assert!(program.take().is_none());
    all.wish(Server::Host);
    assert_eq!(all.outcome(), done(0));
    assert_eq!(all.calls()[1..], ["resume --all"]);
    // Nothing is left to suspend.
    all.wish(Server::Parked);
    assert_eq!(all.outcome(), done(0));
    assert_eq!(all.calls().len(), 2);
}

#[test]
fn what_keeps_a_program_is_told_and_all_go_on() {
    let mut all = Suspensions::new(true, |_| {});
    let program = all.rig.program();
    let (number, ..) = program.open();
    fs::write(all.file("refuse"), "PID 7 (x) stays").unwrap();
    let reason = "nothing was changed: PID 7 (x) stays";
    for by in [Server::Examined, Server::Parked] {
        all.wish(by);
        assert_eq!(all.outcome(), (OutcomeKind::Stay, 1, reason.to_owned()));
        assert_eq!(program.call(command::ECHO, number, b"x").1, b"x");
    }
    fs::remove_file(all.file("gantry-checkpoint")).unwrap();
    all.wish(Server::Parked);
    let (kind, _, reason) = all.outcome();
    assert_eq!(kind, OutcomeKind::Stay);
    assert!(reason.contains("no gantry-checkpoint"), "{reason}");
    all.wish(Server::Away);
    assert_eq!(all.outcome().0, OutcomeKind::Cannot);
    assert_eq!(program.call(command::ECHO, number, b"x").1, b"x");
}

#[test]
fn programs_that_could_be_suspended_are_not_touched() {
    let mut all = Suspensions::new(true, |_| {});
    let program = all.rig.program();
    all.wish(Server::Examined);
    assert_eq!(all.outcome(), done(1));
    let check = format!("suspend --released --check {}", process::id());
    assert_eq!(all.calls(), [check]);
    assert_eq!(program.call(command::ECHO, 0, b"x").1, b"x");
}

#[test]
fn a_wish_that_comes_while_one_is_carried_out_is_begun_and_told_of_a_hang() {
    for has_interrupts in [true, false] {
        let mut all = Suspensions::new(has_interrupts, |folder| {
            fs::write(folder.join("slow"), "").unwrap();
        });
        let program = all.rig.program();
        all.wish(Server::Parked);
        all.wait_for_calls(1);
        // One of those whose worker has ended may need another one to go on.
        let again = all.rig.connect();
        assert_eq!(again.hello().0.result, 0, "it is served");
        all.wish(Server::Host);
        // The first one is told that it hangs, and the second one, which is heard before.
        let mut told = Vec::new();
        while told.len() < 4 {
            let (outcome, reason) = all.rig.outcomes.recv_timeout(HANGS).unwrap();
            let hangs = reason.contains("PID 7 (x) is being suspended");
            told.push((outcome.number, outcome.kind, hangs));
        }
        for number in [1, 2] {
            let own: Vec<_> = told.iter().filter(|told| told.0 == number).collect();
            assert_eq!(own[0].1, OutcomeKind::Begun, "{told:?}");
            assert_eq!((own[1].1, own[1].2), (OutcomeKind::Stay, true), "{told:?}");
        }
        // When it ends after all, what counts is that nobody wishes it any longer.
        all.set(None);
        fs::remove_file(all.file("slow")).unwrap();
        assert!(program.take().is_none());
        all.wait_for_calls(2);
        all.wait_until_resumed();
    }
}

#[test]
fn a_wish_is_begun_while_files_are_still_open() {
    let mut all = Suspensions::new(true, |_| {});
    let program = all.rig.program();
    let (number, _, file) = program.open();
    all.wish(Server::Parked);
    all.wait_for_calls(1);
    let next = || all.rig.outcomes.recv_timeout(HANGS).unwrap().0;
    assert_eq!((next().number, all.number), (1, 1));
    all.wish(Server::Host);
    let next = || all.rig.outcomes.recv_timeout(HANGS).unwrap().0;
    let begun = next();
    assert_eq!((begun.number, begun.kind), (2, OutcomeKind::Begun));
    drop(file);
    all.rig.wait_for(&Told::Close(number));
    while next()
        != (Outcome {
            number: 2,
            kind: OutcomeKind::Done,
            applications: 0,
        })
    {}
    assert_eq!(all.calls()[1..], ["resume --all"]);
}

#[test]
fn programs_that_keep_memory_are_resumed() {
    let mut all = Suspensions::new(true, |_| {});
    let program = all.rig.program();
    let other = Other::with_window(all.host());
    all.wish(Server::Parked);
    let (kind, _, reason) = all.outcome();
    assert_eq!(kind, OutcomeKind::Stay);
    assert!(reason.contains("left memory"), "{reason}");
    assert_eq!(all.calls()[1..], ["resume --all"]);
    assert_eq!(program.call(command::ECHO, 0, b"x").1, b"x");
    drop(other);
}

#[test]
fn a_resumption_that_fails_is_tried_again() {
    let mut all = Suspensions::new(true, |_| {});
    let program = all.rig.program();
    all.wish(Server::Parked);
    assert_eq!(all.outcome(), done(1));
    drop(program);
    fs::write(all.file("broken"), "no device").unwrap();
    all.wish(Server::Host);
    let reason = "nothing was changed: no device".to_owned();
    assert_eq!(all.outcome(), (OutcomeKind::Stay, 1, reason));
    fs::remove_file(all.file("broken")).unwrap();
    let waiting = all.rig.connect();
    assert_eq!(waiting.hello().0.result, 0, "it is served");
    all.wait_until_resumed();
}

#[test]
fn programs_are_served_and_suspended_while_others_could_not_be_resumed() {
    let mut all = Suspensions::new(true, |folder| {
        fs::create_dir(folder.join("suspended")).unwrap();
        fs::write(folder.join("suspended/1"), "").unwrap();
        fs::write(folder.join("broken"), "no room").unwrap();
    });
    let program = all.rig.program();
    all.wait_for_calls(1);
    assert_eq!(program.call(command::ECHO, 0, b"x").1, b"x");
    let own = process::id();
    all.wish(Server::Examined);
    assert_eq!(all.outcome(), done(1));
    all.wish(Server::Parked);
    assert_eq!(all.outcome(), done(1));
    let calls = all.calls();
    assert!(calls.contains(&format!("suspend --released --check {own}")));
    assert_eq!(calls.last(), Some(&format!("suspend --released {own}")));
    assert!(program.take().is_none());
    all.rig.wait_for(&Told::SliceClosed);
    // A question does not keep them suspended.
    all.wish(Server::Examined);
    assert_eq!(all.outcome(), done(1));
    fs::remove_file(all.file("broken")).unwrap();
    all.wait_until_resumed();
}

#[test]
fn what_an_earlier_agent_has_suspended_is_resumed() {
    let all = Suspensions::new(true, |folder| {
        fs::create_dir(folder.join("suspended")).unwrap();
        fs::write(folder.join("suspended/1"), "").unwrap();
    });
    let program: Program = all.rig.program();
    assert_eq!(all.calls(), ["resume --all"]);
    drop(program);
}
