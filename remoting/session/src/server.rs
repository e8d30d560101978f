//! The serving thread: takes calls, gives answers, and waits for the driver's events.

use std::{
    cell::RefCell,
    collections::VecDeque,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use remoting_proto::wire::{
    Api, Blob, Flags, Header, Malformed, Wire, frame,
    messages::{ANSWER, CALLBACK, PRINTED, RELEASED, REPORT, StageId},
};
use remoting_transport::{
    bell::Bell,
    endpoint::{Gone, Receiver, STAY, Sender, Spin},
    port_bell::Waker,
    ring::{Consumer, Lines, Producer},
    window::{Slice, Window},
};
use remoting_turns::message::OtherArbiter;

use super::{
    backend::{Backend, FenceOf, Fences, Progress, RequestOf},
    carry::Carried,
    checkpoint::{Ordered, Phase},
    drain::PassiveState,
    limit::Limit,
    notice::{Board, Notice},
    postcopy::Remaining,
    precopy::Rounds,
    quota::Quota,
    sharing::Sharing,
    watch::Watch,
    work::Making,
};

/// After a wait of this length, the serving thread is no longer held up by the driver's waits: it
/// can sleep until an event wakes it, and costs its host nothing meanwhile. The end is seen as late
/// then as `watch` looks: by 1 % of the wait.
const LONG: Duration = STAY;
/// The same where others share the device, to whom it may have to be given meanwhile.
pub(crate) const LONG_FOR_OTHERS: Duration = Duration::from_millis(2);
/// The most calls of an application that wait at a time: each is one of its threads.
const MOST_WAITS: usize = 64 << 10;
/// A stage has so many bytes of the window, at least, which it shares with one other at most: what is
/// mapped has one, and what ends the mapping another.
const STAGE: u64 = 4096;
/// The most bytes of a state that a client brings, unless somebody says otherwise.
const MOST_CARRIED: u64 = 1 << 30;
/// How many calls are taken before notices and waits are looked at.
const BATCH: usize = 64;

/// Why a worker ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The rings cannot be used any more.
    #[error("the application's rings are unusable")]
    Gone(#[from] Gone),
    /// The application's driver sent something else than calls.
    #[error("the application sent what is no call")]
    Malformed(#[from] Malformed),
    /// It would wait for the device for ever.
    #[error("the device cannot be shared")]
    Apart(#[from] OtherArbiter),
    /// An application has made a call before the state that it brings was whole.
    #[error("the application has made a call amid the state that it brings")]
    Unfinished,
    /// An application came with a state that cannot be made again: it has stayed where it was.
    #[error("an application has stayed elsewhere, as its state cannot be made again here")]
    Elsewhere,
    /// A command needs contents of memory that have not come from where the application was, and do not come
    /// any more.
    #[error("the application needs contents of memory that were lost when it moved: {0}")]
    Lost(String),
    /// The application's driver sent more calls of a kind than it has memory or threads for.
    #[error(
        "the application has {stages} stages under way and {waits} waiting calls: more than there \
         can be"
    )]
    TooMany {
        /// Stages that have not been released, or that it has not been told of.
        stages: usize,
        /// Calls without an answer.
        waits: usize,
    },
}

/// What an application waits for: its answer is due when these events have completed.
#[derive(Debug)]
pub(crate) struct Wait<F> {
    /// None without threads: how long it takes changes nothing then.
    since: Option<Instant>,
    pub sequence: u64,
    pub fences: Vec<F>,
    /// Whether an event's failure is the answer.
    pub failures: bool,
    /// A code that is to be reported in any case.
    pub code: i32,
    /// Whether this thread is going to be woken.
    armed: bool,
}

/// A stretch of the window in use.
#[derive(Debug)]
struct Use<F> {
    stage: StageId,
    /// Of the command that uses it.
    fence: F,
    /// Whether this thread is going to be woken.
    armed: bool,
    /// Whether the command is whole: a part of it may have failed.
    whole: bool,
}

/// Serves one application, whose requests a backend carries out.
#[derive(Debug)]
pub struct Session<B: Backend> {
    /// The application's objects, and the driver that has them.
    pub backend: B,
    /// The memory that both sides see.
    pub window: Arc<Window>,
    /// What other threads tell the serving thread.
    pub board: Arc<Board<B::Notice>>,
    /// Events that the client has not decided yet: commands may wait for what it does next.
    pub undecided: usize,
    /// Callbacks of the client that the driver has not called yet.
    pub expected: usize,
    /// How long the last wait took.
    pub last_wait: Duration,
    /// How much device memory the application may have.
    pub quota: Arc<Quota>,
    /// Stages whose commands have not been seen to complete.
    stages: VecDeque<Use<FenceOf<B>>>,
    /// Stages whose release the client has not been told; whether their data is good.
    released: Vec<(StageId, bool)>,
    waits: Vec<Wait<FenceOf<B>>>,
    /// Where answers are written.
    pub sender: Sender<Slice, Waker>,
    /// The last wait after which this thread is no longer held up by the driver's.
    pub(crate) patience: Duration,
    /// On a CPU that the application lends: there is no other thread then, and nothing is waited
    /// for.
    pub(crate) passive: Option<PassiveState<RequestOf<B>>>,
    /// Wakes who waits for an answer.
    waker: Waker,
    /// Wakes the client's listener.
    nudge: Nudge,
    /// Its turns on a device that others share.
    pub sharing: Sharing<RequestOf<B>, FenceOf<B>>,
    /// Since the first sleep with commands under way.
    watch: Option<Watch<FenceOf<B>>>,
    /// Looks after the time that commands run, if that is limited.
    pub limit: Option<Limit<FenceOf<B>>>,
    scratch: Vec<u8>,
    /// Whether calls are taken.
    pub phase: Phase,
    /// What the process's control thread wants.
    pub orders: VecDeque<Ordered>,
    /// Where the rings are to be taken up, once a restored session serves: lines read, the beginning
    /// of a message, and lines written.
    pub(crate) start_at: Option<(u64, Vec<u8>, u64)>,
    /// What has been copied of the state for who is about to move it.
    pub(crate) precopied: Option<Rounds<B::Precopied>>,
    /// Lives for as long as a thread copies for that, whether somebody waits for it or not.
    pub copying: Weak<()>,
    /// Contents of memory that a state by postcopy was saved without.
    pub(crate) remaining: Option<Remaining>,
    /// Whether it has objects of a state that is to be restored.
    pub is_prepared: bool,
    /// The state that the client carries elsewhere, or brings.
    pub carried: Carried,
    /// While a state is made that the client has brought.
    pub making: Option<Making>,
    /// The most bytes that a client may bring.
    pub most_carried: u64,
}

/// Wakes the client's listener.
pub struct Nudge(pub Box<dyn Fn() + Send>);

impl std::fmt::Debug for Nudge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Nudge")
    }
}

/// How a server behaves.
#[derive(Clone, Debug)]
pub struct Tuning {
    /// How long to poll before sleeping.
    pub spin: Duration,
    /// How to sleep, and to wake the application.
    pub waker: Waker,
    /// How much device memory the application may have.
    pub quota: Arc<Quota>,
}

impl<B: Backend> Session<B> {
    /// A session with the application at the other end of `window`, and the calls that it gets.
    pub fn new(
        backend: B,
        window: Arc<Window>,
        tuning: Tuning,
        nudge: Nudge,
    ) -> (Self, Receiver<Slice, Waker>) {
        let bell = tuning.waker;
        let passive = matches!(bell, Waker::Passive);
        let session = Self {
            backend,
            board: Board::new(window.calls(), bell.own()),
            undecided: 0,
            expected: 0,
            last_wait: Duration::ZERO,
            quota: tuning.quota,
            stages: VecDeque::new(),
            released: Vec::new(),
            waits: Vec::new(),
            sender: Sender::new(Producer::new(window.answers(), bell.clone()), tuning.spin),
            patience: if passive { Duration::ZERO } else { LONG },
            passive: passive.then(PassiveState::default),
            waker: bell.clone(),
            nudge,
            sharing: Sharing::default(),
            watch: None,
            limit: None,
            scratch: Vec::new(),
            phase: Phase::default(),
            orders: VecDeque::new(),
            start_at: None,
            precopied: None,
            copying: Weak::new(),
            remaining: None,
            is_prepared: false,
            carried: Carried::default(),
            making: None,
            most_carried: MOST_CARRIED,
            window,
        };
        let receiver = Receiver::new(Consumer::new(session.window.calls(), bell));
        (session, receiver)
    }

    /// Limits the time that a command may run: `exceeded` gets the time of one that runs longer.
    pub fn limit(
        &mut self,
        limit: Duration,
        exceeded: impl Fn(Duration) + Send + 'static,
    ) -> std::io::Result<()> {
        let (driver, board) = (Arc::clone(self.backend.driver()), Arc::clone(&self.board));
        let wake = move || board.leave(Notice::Wake);
        self.limit = Some(Limit::start(driver, wake, limit, exceeded)?);
        Ok(())
    }

    /// Whether the driver has all the commands whose time can be looked after, and does not wait
    /// for the client with any of them.
    pub(crate) fn has_all(&self) -> bool {
        self.undecided == 0 && self.limit.as_ref().is_some_and(Limit::is_full)
    }

    /// Whether calls are left in the ring for now.
    fn takes_nothing(&self) -> bool {
        !self.phase.serves() || self.is_full() || self.backend.is_busy() || self.has_all()
    }

    /// Serves until the application's rings become unusable.
    pub fn run(mut self, mut calls: Receiver<Slice, Waker>, spin: Duration) -> Result<(), Error> {
        let mut body = Vec::new();
        let mut spin = Spin::new(spin);
        loop {
            if !self.phase.serves() || !self.orders.is_empty() {
                self.obey(&mut calls)?;
            }
            if self.turn(&mut calls, &mut body)? {
                spin.reset();
            } else if !spin.again() && !self.ends_soon() {
                self.arm();
                self.before_sleep();
                let board = Arc::clone(&self.board);
                if self.takes_nothing() {
                    calls.rest(|| board.any());
                } else {
                    calls.sleep(|| board.any());
                }
            }
        }
    }

    /// Does what there is to do, up to a bound. Whether there was something.
    pub fn turn(
        &mut self,
        calls: &mut Receiver<Slice, Waker>,
        body: &mut Vec<u8>,
    ) -> Result<bool, Error> {
        let mut busy = B::resume(self)? | self.serve_held()?;
        for _ in 0..BATCH {
            if self.takes_nothing() {
                break;
            }
            let Some(header) = calls.poll(body)? else {
                break;
            };
            busy = true;
            calls.fetch_next();
            let request = B::Api::decode(header.opcode, body)?;
            self.serve_in_turn(header, request, body.len())?;
        }
        if busy {
            self.give_way();
        }
        busy |= self.notices()?;
        busy |= self.poll_waits()?;
        Ok(busy || self.pass_on()?)
    }

    /// Wakes who sleeps until there is an answer, although there is none yet.
    pub(crate) fn rouse_client(&self) {
        let answers = self.window.answers();
        self.waker.ring(&answers.control().items.0);
    }

    /// Whether there are threads beside the serving one.
    pub fn has_threads(&self) -> bool {
        self.passive.is_none()
    }

    /// Sends a message to the client.
    pub fn send(&mut self, opcode: u16, sequence: u64, body: &[u8]) -> Result<(), Gone> {
        let header = Header {
            length: 0,
            opcode,
            flags: Flags::default(),
            sequence,
        };
        if let Some(passive) = &mut self.passive {
            return passive.unsent.add(&mut self.sender, header, body);
        }
        let (backend, undecided) = (&self.backend, self.undecided);
        let sharing = RefCell::new(&mut self.sharing);
        // The client's end ends this process: it is not looked for while waiting for room.
        self.sender.send(header, body, || {
            sharing.borrow_mut().let_go(backend, undecided);
            true
        })
    }

    /// Tells the client which stages are its own again: before each answer, so that what a wait
    /// has waited for is in place when it ends.
    pub fn tell_released(&mut self) -> Result<(), Gone> {
        self.retire_stages();
        for (stage, good) in std::mem::take(&mut self.released) {
            let mut body = Vec::with_capacity(8);
            stage.put(&mut body);
            good.put(&mut body);
            self.send(RELEASED, 0, &body)?;
        }
        Ok(())
    }

    /// Whether a stage's command has completed; the stage is released then.
    fn is_over(&mut self, used: &Use<FenceOf<B>>) -> bool {
        let driver = self.backend.driver();
        let progress = driver.poll(used.fence);
        if !progress.is_over() {
            return false;
        }
        driver.release(used.fence);
        self.released
            .push((used.stage, used.whole && progress == Progress::Complete));
        true
    }

    /// Passes on the oldest stages as soon as they are released, if somebody waits: a large
    /// read's first pieces reach their place while the last are on their way. (Who does not wait
    /// does not read, and the ring of answers would fill up.) Whether there was one.
    pub(crate) fn pass_on(&mut self) -> Result<bool, Gone> {
        if self.waits.is_empty() {
            return Ok(false);
        }
        while let Some(used) = self.stages.pop_front() {
            if !self.is_over(&used) {
                self.stages.push_front(used);
                break;
            }
        }
        if self.released.is_empty() {
            return Ok(false);
        }
        self.tell_released()?;
        Ok(true)
    }

    /// Whether this thread may be held up by a wait for commands: if only one thread of the client
    /// has made calls, and that one waits; if nothing that commands wait for is up to the client; and
    /// if nobody else is to be told of anything meanwhile. The commands may still wait for what
    /// another thread sends with its first call.
    pub fn may_stay(&self, header: Header) -> bool {
        header.flags.has(Flags::ANSWER)
            && header.flags.has(Flags::ALONE)
            && self.undecided == 0
            && self.expected == 0
            && self.stages.is_empty()
            && self.last_wait < self.patience
    }

    /// Answers a call that wants an answer.
    pub fn answer<T: Wire>(
        &mut self,
        header: Header,
        outcome: &Result<T, i32>,
    ) -> Result<(), Gone> {
        if !header.flags.has(Flags::ANSWER) {
            return Ok(());
        }
        self.tell_released()?;
        while let Some(text) = self.backend.printed() {
            self.send(PRINTED, 0, &text)?;
        }
        let mut body = std::mem::take(&mut self.scratch);
        body.clear();
        outcome.put(&mut body);
        if body.len() > frame::LARGEST {
            body.clear();
            Err::<(), i32>(B::ANSWER_TOO_LONG).put(&mut body);
        }
        let sent = self.send(ANSWER, header.sequence, &body);
        self.scratch = body;
        sent
    }

    /// Answers once these fences, of each of which this takes over a reference, are over.
    pub fn answer_later(
        &mut self,
        header: Header,
        fences: Vec<FenceOf<B>>,
        failures: bool,
        code: i32,
    ) {
        self.waits.push(Wait {
            since: self.has_threads().then(Instant::now),
            sequence: header.sequence,
            fences,
            failures,
            code,
            armed: false,
        });
    }

    /// Waits with this thread for what the client waits for, no longer than it
    /// [may be held up](Self::may_stay): whatever is not over by then is looked at between calls.
    /// Whether all has been answered.
    pub fn stay(&mut self) -> Result<bool, Gone> {
        let mut spin = Spin::new(self.patience);
        self.sender.attend(true);
        while !self.waits.is_empty() && !self.board.any() && spin.again() {
            self.poll_waits()?;
        }
        self.sender.attend(false);
        Ok(self.waits.is_empty())
    }

    /// Takes up the wait of a call of a session that was saved.
    pub(crate) fn take_up_wait(
        &mut self,
        sequence: u64,
        fences: Vec<FenceOf<B>>,
        failures: bool,
        code: i32,
    ) {
        let header = Header {
            length: 0,
            opcode: 0,
            flags: Flags::ANSWER,
            sequence,
        };
        self.answer_later(header, fences, failures, code);
    }

    /// Calls without an answer.
    pub(crate) fn waits(&self) -> &[Wait<FenceOf<B>>] {
        &self.waits
    }

    /// Whether commands are not known to have completed that use stages.
    pub fn has_stages(&self) -> bool {
        !self.stages.is_empty()
    }

    /// Stages whose release the client has not been told, and whether their data is good.
    pub fn released_stages(&self) -> &[(StageId, bool)] {
        &self.released
    }

    /// Takes note of commands that have completed and use stages no more.
    pub fn retire_stages(&mut self) {
        let mut pending = std::mem::take(&mut self.stages);
        pending.retain(|used| !self.is_over(used));
        self.stages = pending;
    }

    /// Remembers that a command uses a stage until `fence`, a reference to which this takes over. If the
    /// driver has refused a part of it, it is not `whole`: what it leaves in the stage is no good then.
    pub fn stage_until(&mut self, stage: StageId, fence: FenceOf<B>, whole: bool) {
        let armed = false;
        self.stages.push_back(Use {
            stage,
            fence,
            armed,
            whole,
        });
    }

    /// A stage that no command uses.
    pub fn stage_free(&mut self, stage: StageId, good: bool) {
        self.released.push((stage, good));
    }

    /// The fence of a command that uses a stage, if it is not over as far as is known.
    pub fn stage_fence(&self, stage: StageId) -> Option<FenceOf<B>> {
        self.stages
            .iter()
            .find_map(|used| (used.stage == stage).then_some(used.fence))
    }

    /// Answers waits that are over, and gives back what was freed and is not used any more. Whether
    /// there was something.
    pub fn poll_waits(&mut self) -> Result<bool, Gone> {
        let mut progress = self.backend.sweep();
        let mut index = 0;
        while index < self.waits.len() {
            let mut failed = false;
            let driver = self.backend.driver();
            let over = self.waits[index].fences.iter().all(|&fence| {
                let progress = driver.poll(fence);
                failed |= progress == Progress::Failed;
                progress.is_over()
            });
            if !over {
                index += 1;
                continue;
            }
            progress = true;
            let wait = self.waits.swap_remove(index);
            self.last_wait = wait.since.map_or(Duration::ZERO, |since| since.elapsed());
            if !failed {
                self.backend.waited(&wait.fences);
            }
            for fence in wait.fences {
                self.backend.driver().release(fence);
            }
            let code = match wait.code {
                0 if failed && wait.failures => B::FENCE_FAILED,
                code => code,
            };
            let header = Header {
                length: 0,
                opcode: 0,
                flags: Flags::ANSWER,
                sequence: wait.sequence,
            };
            let outcome = if code == 0 { Ok(()) } else { Err(code) };
            self.answer(header, &outcome)?;
        }
        Ok(progress)
    }

    /// Has this thread woken when what is waited for changes.
    fn arm(&mut self) {
        if self.has_all() {
            // What the driver keeps back would never end.
            self.backend.flush_all();
        }
        let mut fences = Vec::new();
        for wait in self.waits.iter_mut().filter(|wait| !wait.armed) {
            wait.armed = true;
            fences.extend_from_slice(&wait.fences);
        }
        self.backend.sweep_after(&mut fences);
        if !self.waits.is_empty()
            && let Some(oldest) = self.stages.front_mut().filter(|used| !used.armed)
        {
            oldest.armed = true;
            fences.push(oldest.fence);
        }
        fences.into_iter().for_each(|fence| self.watch(fence, None));
    }

    /// Has this thread woken when a fence is over, and after some time if it is not.
    pub fn watch(&mut self, fence: FenceOf<B>, after: Option<Duration>) {
        if self.watch.is_none() {
            let board = Arc::clone(&self.board);
            let wake = move || board.leave(Notice::Wake);
            let started = Watch::start(Arc::clone(self.backend.driver()), wake);
            self.watch = started
                .inspect_err(|error| {
                    // The bell's patience bounds the wait.
                    base::note!(
                        "gantry-accel: cannot start a thread that waits for commands ({error}): \
                         their ends are noticed late"
                    );
                })
                .ok();
        }
        if let Some(watch) = &self.watch {
            self.backend.driver().retain(fence);
            watch.order(fence, after);
        }
    }

    /// Passes on what happened in other threads. Whether there was something.
    pub fn notices(&mut self) -> Result<bool, Error> {
        if !self.board.any() {
            return Ok(false);
        }
        for notice in self.board.take() {
            match notice {
                Notice::Wake => {}
                Notice::Callback(number, status) => {
                    self.expected -= usize::from(self.backend.called(number));
                    self.call_back(number, status)?;
                }
                Notice::Backend(notice) => B::notice(self, notice)?,
                Notice::Control(ordered) => self.orders.push_back(ordered),
                Notice::Copied(header, copied) => self.copied(header, copied)?,
                Notice::Apart(other) => return Err(other.into()),
            }
        }
        Ok(true)
    }

    /// Tells the client that its callback of this number is due.
    pub fn call_back(&mut self, number: u64, status: i32) -> Result<(), Gone> {
        self.tell_released()?;
        let mut body = Vec::with_capacity(12);
        number.put(&mut body);
        status.put(&mut body);
        self.send(CALLBACK, 0, &body)?;
        (self.nudge.0)();
        Ok(())
    }

    /// Tells the client of something about an object that went wrong and that no answer tells of.
    pub fn report(&mut self, object: u32, text: Vec<u8>) -> Result<(), Gone> {
        let mut body = Vec::with_capacity(8 + text.len());
        (object, Blob(text)).put(&mut body);
        self.send(REPORT, 0, &body)?;
        (self.nudge.0)();
        Ok(())
    }

    /// Carries out one call. Afterwards no more is kept than an application can have need of.
    pub fn serve(&mut self, header: Header, request: RequestOf<B>) -> Result<(), Error> {
        B::execute(self, header, request)?;
        let (stages, waits) = (self.stages.len() + self.released.len(), self.waits.len());
        if stages as u64 > 2 * self.window.size() / STAGE || waits > MOST_WAITS {
            return Err(Error::TooMany { stages, waits });
        }
        Ok(())
    }
}
