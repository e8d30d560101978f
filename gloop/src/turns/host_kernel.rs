//! A kernel that is a host thread: it handles orders and grants as the device library does
//! (`include/gloop/loop.cuh`), for tests of turns without a GPU.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use remoting_turns::session::Session;

use crate::{
    state::State,
    turns::{Error, Resumable},
};

/// The duration of a step. A kernel is stopped between two steps.
const STEP: Duration = Duration::from_micros(20);

/// What launch and host share, corresponding to [`crate::layout::Orders`] and the saved blocks.
#[derive(Debug, Default)]
pub struct Memory {
    stop: AtomicU32,
    contended: AtomicU32,
    /// The number of steps done, in all launches.
    pub done: AtomicU64,
    /// The number of steps available so far.
    pub given: AtomicU64,
}

/// The kernel. It has a number of steps; those that are not available yet are events that it waits
/// for.
#[derive(Debug)]
pub struct HostKernel {
    /// What it has computed, and has to compute.
    pub memory: Arc<Memory>,
    steps: u64,
    /// Whether it reads the arbiter's page by itself.
    reads: bool,
    /// Whether it stops when it is told to.
    obeys: bool,
    session: Option<Arc<Session>>,
    launch: u32,
    thread: Option<thread::JoinHandle<State>>,
    state: State,
}

impl HostKernel {
    /// A kernel with `steps` steps, `given` of which are available. `reads`: whether it reads the
    /// arbiter's page by itself.
    pub fn new(steps: u64, given: u64, reads: bool) -> Self {
        let memory = Memory::default();
        memory.given.store(given, Ordering::Relaxed);
        Self {
            memory: Arc::new(memory),
            steps,
            reads,
            obeys: true,
            session: None,
            launch: 0,
            thread: None,
            state: State::Ready,
        }
    }

    /// The same, without points at which it could be stopped.
    #[allow(dead_code, reason = "not every user of this file has one")]
    pub fn stubborn(self) -> Self {
        Self {
            obeys: false,
            ..self
        }
    }
}

/// Runs one launch.
fn run(memory: &Memory, steps: u64, launch: u32, turns: Option<(&Session, u32)>) -> State {
    let said = |word: &AtomicU32| word.load(Ordering::Acquire);
    let over = |(session, turn): (&Session, u32)| said(&session.grant().stop) == turn;
    let wanted = |(session, _): (&Session, u32)| said(&session.grant().contended) != 0;
    loop {
        let done = memory.done.load(Ordering::Relaxed);
        if done == steps {
            return State::Done;
        }
        if said(&memory.stop) == launch || turns.is_some_and(over) {
            return State::Ready;
        }
        let begun = Instant::now();
        if done == memory.given.load(Ordering::Acquire) {
            if said(&memory.contended) == launch || turns.is_some_and(wanted) {
                return State::Waiting;
            }
            thread::yield_now();
            continue;
        }
        while begun.elapsed() < STEP {
            std::hint::spin_loop();
        }
        memory.done.store(done + 1, Ordering::Relaxed);
    }
}

impl Resumable for HostKernel {
    type Error = Error;

    fn meet(&mut self, session: &Arc<Session>) {
        self.session = Some(Arc::clone(session));
    }

    fn resume_in(&mut self, turn: u32) -> Result<(), Error> {
        self.launch += 1;
        let (memory, steps) = (Arc::clone(&self.memory), self.steps);
        // No launch of a test has the highest number.
        let launch = if self.obeys { self.launch } else { u32::MAX };
        let session = self.session.clone().filter(|_| self.reads && self.obeys);
        let kernel = thread::Builder::new().spawn(move || {
            let turns = session.as_deref().map(|session| (session, turn));
            run(&memory, steps, launch, turns)
        });
        self.thread = Some(kernel?);
        self.state = State::Running;
        Ok(())
    }

    fn look(&mut self) -> Result<State, Error> {
        if let Some(kernel) = self.thread.take_if(|kernel| kernel.is_finished()) {
            let ended = kernel.join();
            self.state = ended.map_err(|_| io::Error::other("the kernel has panicked"))?;
        }
        Ok(self.state)
    }

    fn stop(&self) {
        self.memory.stop.store(self.launch, Ordering::Release);
    }

    fn contend(&self) {
        self.memory.contended.store(self.launch, Ordering::Release);
    }

    fn wait_for_more(&self) {
        while self.memory.given.load(Ordering::Acquire) == self.memory.done.load(Ordering::Relaxed)
        {
            thread::sleep(Duration::from_millis(1));
        }
    }
}
