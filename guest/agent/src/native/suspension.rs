//! Programs that are suspended as the host wishes, and resumed.
//!
//! ```text
//!   Serving ─wish Parked─> Works (suspends) ─> Releases ─files are closed─> Closes ─slice is free─> Suspended
//!      ^                       │ failed            │ some are not               │                      │
//!      └────── Works (resumes) <───────────────────┴────────────────────────────┘ <─no such wish ──────┘
//! ```
//!
//! Suspended programs have everything in their own memory, and the slice is closed: the VM can be saved and moved. The
//! wish is what counts, not its arrival: where there is none, as in a VM that was restored or whose host has given up,
//! programs are resumed. An agent that starts knows from the checkpointer's journal that programs are suspended.
//!
//! Meanwhile a program that connects waits. Only the checkpointer, which uses the driver's library, is served.

use std::time::{Duration, Instant};

use remoting_proto::port::{Outcome, OutcomeKind, Server, State, Wish};

use super::{
    checkpointer::{Checkpointer, Failure, Task, Working},
    port_link::OneSlice,
    programs::Programs,
    readiness::{READ, Source},
};
use crate::holders;

/// How long the ends of suspended programs' device files may take to be seen.
const RELEASE: Duration = Duration::from_secs(30);
/// How long the slice may take to be closed.
const CLOSE: Duration = Duration::from_secs(60);
/// How often the wish is looked at while programs are suspended: nothing tells of the restored VM's end of it.
const LOOK: Duration = Duration::from_millis(100);
/// The same while nothing is suspended and there are no interrupts.
const SELDOM: Duration = Duration::from_secs(1);
/// How long after a failed resumption it is tried again, at first and at most.
const AGAIN: Duration = Duration::from_secs(1);
const AT_MOST: Duration = Duration::from_secs(60);
/// How long the checkpointer may work until it seems to hang: less than the host waits, which is ten minutes.
const HANGS: Duration = match cfg!(test) {
    true => Duration::from_millis(300),
    false => Duration::from_secs(540),
};
const ELSEWHERE: &str = "programs with native contexts are served by their port only";

/// What the host is told when programs have been resumed.
enum Report {
    /// Nothing: it does not ask.
    None,
    /// That they are.
    Resumed(Wish),
    /// Why they were not suspended.
    Stay(Wish, String),
}

/// What the checkpointer is to do.
enum Purpose {
    /// To look for what is in the way.
    Check(Wish, u16),
    /// These processes.
    Suspend(Wish, Vec<u32>),
    Resume(Report),
}

/// A checkpointer that works.
struct Work {
    purpose: Purpose,
    working: Working,
    since: Instant,
    /// Whether the log says that it seems to hang.
    is_noted: bool,
}

impl Purpose {
    /// The wish that it is for.
    fn wish(&self) -> Option<Wish> {
        match self {
            Self::Check(wish, _) | Self::Suspend(wish, _) => Some(*wish),
            Self::Resume(Report::Resumed(wish) | Report::Stay(wish, _)) => Some(*wish),
            Self::Resume(Report::None) => None,
        }
    }
}

enum Phase {
    Serving,
    Works(Work),
    /// Suspended programs' files are about to be closed.
    Releases {
        wish: Wish,
        programs: u16,
        since: Instant,
    },
    /// The slice is.
    Closes {
        wish: Wish,
        programs: u16,
        since: Instant,
    },
    Suspended {
        programs: u16,
    },
}

/// The suspension of all programs of a port.
pub struct Suspension {
    checkpointer: Checkpointer,
    phase: Phase,
    /// The last wish that was answered, or is being carried out.
    heard: Option<Wish>,
    /// The wish after it, which is told to have begun, and waits.
    waiting: Option<Wish>,
    /// When a resumption of which a part has failed is tried again. Other programs are served meanwhile.
    again: Option<Instant>,
    /// How long after a failed resumption the next one is tried.
    delay: Duration,
}

impl Suspension {
    /// Of the programs that this checkpointer may have suspended for an earlier agent.
    pub fn new(checkpointer: Checkpointer) -> Self {
        let phase = match checkpointer.suspended() {
            0 => Phase::Serving,
            programs => Phase::Suspended { programs },
        };
        Self {
            checkpointer,
            phase,
            heard: None,
            waiting: None,
            again: None,
            delay: AGAIN,
        }
    }

    /// Whether the slice stays closed.
    pub fn is_closed(&self) -> bool {
        matches!(self.phase, Phase::Closes { .. } | Phase::Suspended { .. })
    }

    /// Whether a program is served that connects now.
    pub fn admits(&self, process: u32, user: u32) -> bool {
        match self.phase {
            Phase::Serving => true,
            Phase::Works(ref work) => match work.purpose {
                Purpose::Check(..) | Purpose::Resume(_) => true,
                // One whose worker has ended meanwhile may have to go on with another one.
                Purpose::Suspend(_, ref processes) => {
                    processes.contains(&process) || Checkpointer::is(process, user)
                }
            },
            Phase::Releases { .. } | Phase::Closes { .. } | Phase::Suspended { .. } => false,
        }
    }

    /// The time until the next look.
    pub fn next_look(&self, has_interrupts: bool) -> Option<Duration> {
        match &self.phase {
            Phase::Serving => {
                let again = self
                    .again
                    .map(|at| at.saturating_duration_since(Instant::now()).max(LOOK));
                let wish = (!has_interrupts).then_some(SELDOM);
                again.into_iter().chain(wish).min()
            }
            // Its end is waited for; and whether it hangs.
            Phase::Works(work) if has_interrupts && work.is_noted => None,
            Phase::Works(_) => Some(SELDOM),
            _ => Some(LOOK),
        }
    }

    /// Continues, and returns whether the slice is to be closed. While programs are served, a wish is looked for if that is
    /// due: it costs an exit.
    pub fn step(&mut self, port: &impl OneSlice, programs: &Programs, is_due: bool) -> bool {
        let mut step = Step {
            suspension: self,
            port,
            programs,
            closes: false,
        };
        step.go_on(is_due);
        step.closes
    }
}

/// The suspension, with what it works on.
struct Step<'a, P> {
    suspension: &'a mut Suspension,
    port: &'a P,
    programs: &'a Programs,
    /// Whether the slice is to be closed.
    closes: bool,
}

impl<P: OneSlice> Step<'_, P> {
    fn go_on(&mut self, is_due: bool) {
        let phase = std::mem::replace(&mut self.suspension.phase, Phase::Serving);
        let was_serving = matches!(phase, Phase::Serving);
        let phase = match phase {
            Phase::Serving => Phase::Serving,
            Phase::Works(mut work) => match work.working.ended() {
                None => self.still_works(work, is_due),
                Some(ended) => {
                    self.programs.readiness.remove(work.working.end());
                    self.worked(work.purpose, ended)
                }
            },
            Phase::Releases {
                wish,
                programs,
                since,
            } => {
                self.begin_next(is_due);
                self.release_all(wish, programs, since)
            }
            Phase::Closes {
                wish,
                programs,
                since,
            } => {
                self.begin_next(is_due);
                self.closed(wish, programs, since)
            }
            Phase::Suspended { programs } => self.stay_suspended(programs),
        };
        self.suspension.phase = match phase {
            // Another wish may have come meanwhile.
            Phase::Serving if is_due || !was_serving => self.hear_wish(),
            phase => phase,
        };
        let is_serving = matches!(self.suspension.phase, Phase::Serving);
        if is_serving && self.suspension.again.is_some_and(|at| at <= Instant::now()) {
            self.suspension.phase = self.resume(Report::None);
        }
    }

    /// A wish that was not heard before.
    fn new_wish(&mut self) -> Option<Wish> {
        let wish = self.port.wish();
        if wish == self.suspension.heard {
            return None;
        }
        self.suspension.heard = wish;
        self.suspension.waiting = None;
        wish
    }

    fn tell(&self, wish: Wish, kind: OutcomeKind, applications: u16, reason: &str) {
        let outcome = Outcome {
            number: wish.number,
            kind,
            applications,
        };
        self.port.tell(outcome, reason);
    }

    /// Begins what the host wishes while programs are served.
    fn hear_wish(&mut self) -> Phase {
        let Some(wish) = self.new_wish() else {
            return Phase::Serving;
        };
        self.tell(wish, OutcomeKind::Begun, 0, "");
        match wish.by {
            Server::Parked => self.suspend(wish, false),
            Server::Examined => self.suspend(wish, true),
            Server::Host if self.suspension.checkpointer.has_suspended() => {
                self.resume(Report::Resumed(wish))
            }
            Server::Host => {
                self.tell(wish, OutcomeKind::Done, 0, "");
                Phase::Serving
            }
            Server::Local | Server::Elsewhere | Server::Away => {
                self.tell(wish, OutcomeKind::Cannot, 0, ELSEWHERE);
                Phase::Serving
            }
        }
    }

    /// Suspends the programs that are served, or only asks whether that could be done.
    fn suspend(&mut self, wish: Wish, is_trial: bool) -> Phase {
        let processes = self.programs.processes();
        if processes.is_empty() {
            if is_trial {
                self.tell(wish, OutcomeKind::Done, 0, "");
                return Phase::Serving;
            }
            return Phase::Releases {
                wish,
                programs: 0,
                since: Instant::now(),
            };
        }
        let count = u16::try_from(processes.len()).unwrap_or(u16::MAX);
        let (purpose, task) = match is_trial {
            true => (Purpose::Check(wish, count), Task::Check(&processes)),
            false => (
                Purpose::Suspend(wish, processes.clone()),
                Task::Suspend(&processes),
            ),
        };
        self.work(purpose, task).unwrap_or_else(|reason| {
            self.tell(wish, OutcomeKind::Stay, count, &reason);
            Phase::Serving
        })
    }

    /// Starts the checkpointer. The error is the reason in one line.
    fn work(&self, purpose: Purpose, task: Task<'_>) -> Result<Phase, String> {
        let working = self.suspension.checkpointer.start(task)?;
        let waited = self
            .programs
            .readiness
            .add(working.end(), READ, Source::Checkpointer);
        waited.map_err(|error| format!("cannot wait for gantry-checkpoint: {error}"))?;
        Ok(Phase::Works(Work {
            purpose,
            working,
            since: Instant::now(),
            is_noted: false,
        }))
    }

    /// The checkpointer has not ended. Nothing may end it amid a step of the driver: a wish that comes meanwhile waits,
    /// unless it seems to hang.
    fn still_works(&mut self, mut work: Work, is_due: bool) -> Phase {
        self.begin_next(is_due);
        if work.since.elapsed() < HANGS {
            return Phase::Works(work);
        }
        let reason = work.working.hanging(work.since);
        if !work.is_noted {
            base::note!("gantry-agent: {reason}");
            work.is_noted = true;
            if let Some(wish) = work.purpose.wish() {
                self.tell(wish, OutcomeKind::Stay, 1, &reason);
            }
        }
        if let Some(wish) = self.suspension.waiting.take() {
            self.suspension.heard = Some(wish);
            self.tell(wish, OutcomeKind::Stay, 1, &reason);
        }
        Phase::Works(work)
    }

    /// Tells the host of a wish that comes while another one is carried out that it is heard.
    fn begin_next(&mut self, is_due: bool) {
        let wish = match is_due {
            true => self.port.wish(),
            false => None,
        };
        let Suspension { heard, waiting, .. } = self.suspension;
        if let Some(new) = wish.filter(|_| wish != *heard && wish != *waiting) {
            *waiting = wish;
            self.tell(new, OutcomeKind::Begun, 0, "");
        }
    }

    /// Resumes what is suspended.
    fn resume(&mut self, report: Report) -> Phase {
        self.suspension.again = None;
        let wish = match &report {
            Report::None => None,
            Report::Resumed(wish) | Report::Stay(wish, _) => Some(*wish),
        };
        self.work(Purpose::Resume(report), Task::Resume)
            .unwrap_or_else(|reason| {
                base::note!("gantry-agent: programs stay suspended: {reason}");
                if let Some(wish) = wish {
                    self.tell(wish, OutcomeKind::Stay, 1, &reason);
                }
                self.try_again()
            })
    }

    /// Programs stay suspended until the next attempt. Others are served.
    fn try_again(&mut self) -> Phase {
        let delay = self.suspension.delay;
        self.suspension.delay = (delay * 2).min(AT_MOST);
        self.suspension.again = Some(Instant::now() + delay);
        Phase::Serving
    }

    /// The checkpointer has ended.
    fn worked(&mut self, purpose: Purpose, ended: Result<Vec<String>, Failure>) -> Phase {
        if !matches!(purpose, Purpose::Check(..)) {
            for line in ended.iter().flatten() {
                base::note!("gantry-agent: {line}");
            }
        }
        match (purpose, ended) {
            (Purpose::Check(wish, programs), Ok(_)) => {
                self.tell(wish, OutcomeKind::Done, programs, "");
                Phase::Serving
            }
            (Purpose::Check(wish, programs), Err(failure)) => {
                self.tell(wish, OutcomeKind::Stay, programs, &failure.reason);
                Phase::Serving
            }
            (Purpose::Suspend(wish, processes), Ok(_)) => Phase::Releases {
                wish,
                programs: u16::try_from(processes.len()).unwrap_or(u16::MAX),
                since: Instant::now(),
            },
            (Purpose::Suspend(wish, _), Err(failure)) => self.give_up(wish, failure.reason),
            (Purpose::Resume(report), ended) => self.resumed(&report, ended.map(drop)),
        }
    }

    /// Programs are not suspended after all. It undoes what it has done, but for what it could not.
    fn give_up(&mut self, wish: Wish, reason: String) -> Phase {
        base::note!("gantry-agent: programs are not suspended: {reason}");
        if self.suspension.checkpointer.has_suspended() {
            return self.resume(Report::Stay(wish, reason));
        }
        self.tell(wish, OutcomeKind::Stay, 1, &reason);
        Phase::Serving
    }

    fn resumed(&mut self, report: &Report, ended: Result<(), Failure>) -> Phase {
        match (report, &ended) {
            (Report::None, _) => {}
            (Report::Resumed(wish), Ok(())) => self.tell(*wish, OutcomeKind::Done, 0, ""),
            (Report::Resumed(wish), Err(failure)) => {
                self.tell(*wish, OutcomeKind::Stay, 1, &failure.reason);
            }
            (Report::Stay(wish, reason), Ok(())) => {
                self.tell(*wish, OutcomeKind::Stay, 1, reason);
            }
            (Report::Stay(wish, reason), Err(failure)) => {
                let reason = format!("{reason}; then: {}", failure.reason);
                self.tell(*wish, OutcomeKind::Stay, 1, &reason);
            }
        }
        let Err(failure) = ended else {
            base::note!("gantry-agent: suspended programs go on");
            self.suspension.delay = AGAIN;
            return Phase::Serving;
        };
        base::note!(
            "gantry-agent: not all programs are resumed: {}",
            failure.reason
        );
        if failure.is_final || !self.suspension.checkpointer.has_suspended() {
            return Phase::Serving;
        }
        self.try_again()
    }

    /// Closes the slice when suspended programs have nothing of it.
    fn release_all(&mut self, wish: Wish, programs: u16, since: Instant) -> Phase {
        let files = self.programs.files();
        if files > 0 {
            if since.elapsed() < RELEASE {
                return Phase::Releases {
                    wish,
                    programs,
                    since,
                };
            }
            let reason = format!("{files} device files of suspended programs are still open");
            return self.give_up(wish, reason);
        }
        if let Some(by) = holders::mapping(&self.programs.memory, None) {
            return self.give_up(
                wish,
                format!("{by}, in which its suspension has left memory"),
            );
        }
        self.closes = true;
        Phase::Closes {
            wish,
            programs,
            since: Instant::now(),
        }
    }

    fn closed(&mut self, wish: Wish, programs: u16, since: Instant) -> Phase {
        if self.port.state() == State::Free {
            base::note!(
                "gantry-agent: {programs} programs with native contexts are suspended: they go on when the host lets them"
            );
            self.tell(wish, OutcomeKind::Done, programs, "");
            (self.suspension.again, self.suspension.delay) = (None, AGAIN);
            return Phase::Suspended { programs };
        }
        if since.elapsed() < CLOSE {
            return Phase::Closes {
                wish,
                programs,
                since,
            };
        }
        let reason = "the accelerator port's slice does not become free";
        self.give_up(wish, reason.to_owned())
    }

    /// Resumes programs when the host does not wish that they are suspended any longer.
    fn stay_suspended(&mut self, programs: u16) -> Phase {
        let wish = self.port.wish();
        let new = self.new_wish();
        if let Some(wish) = new {
            self.tell(wish, OutcomeKind::Begun, 0, "");
        }
        match new {
            Some(wish) if matches!(wish.by, Server::Parked | Server::Examined) => {
                self.tell(wish, OutcomeKind::Done, programs, "");
            }
            Some(wish) if wish.by == Server::Host => return self.resume(Report::Resumed(wish)),
            Some(wish) => self.tell(wish, OutcomeKind::Cannot, 0, ELSEWHERE),
            None => {}
        }
        match wish {
            Some(wish) if wish.by == Server::Parked => Phase::Suspended { programs },
            _ => self.resume(Report::None),
        }
    }
}
