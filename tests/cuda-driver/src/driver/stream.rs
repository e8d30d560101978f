//! Streams: a thread each, so that work that should wait for other work, and does not, is seen to fail.

use std::{
    any::Any,
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Instant,
};

use cuda_definition::driver::types::CUresult;

use super::{Answer, context::Context, objects};

/// What a stream does once; in a graph, again and again.
pub type Task = Arc<dyn Fn(&Arc<Context>) -> Answer + Send + Sync>;

/// Work that a stream waits for: all of a stream up to a number.
#[derive(Clone)]
pub struct Mark {
    stream: Arc<Stream>,
    number: u64,
}

impl Mark {
    /// Whether it is done.
    pub fn done(&self) -> bool {
        self.stream.state().completed >= self.number
    }

    /// Waits until it is done.
    pub fn wait(&self) {
        let mut state = self.stream.state();
        while state.completed < self.number {
            state = self
                .stream
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[derive(Default)]
struct State {
    queue: VecDeque<(Vec<Mark>, Task)>,
    submitted: u64,
    completed: u64,
    closed: bool,
}

/// A stream.
pub struct Stream {
    pub handle: u64,
    pub context: Weak<Context>,
    /// Whether it waits for the legacy stream, and the legacy stream for it.
    pub blocking: bool,
    pub priority: i32,
    state: Mutex<State>,
    changed: Condvar,
    /// The graph that is made of its work instead of doing it.
    pub capture: Mutex<Option<Arc<Graph>>>,
}

impl Stream {
    /// A stream and its thread.
    pub fn start(
        handle: u64,
        context: &Arc<Context>,
        blocking: bool,
        priority: i32,
    ) -> Answer<Arc<Self>> {
        let stream = Arc::new(Self {
            handle,
            context: Arc::downgrade(context),
            blocking,
            priority,
            state: Mutex::default(),
            changed: Condvar::new(),
            capture: Mutex::default(),
        });
        let own = Arc::clone(&stream);
        let thread = std::thread::Builder::new().name(format!("cuda stream {handle:x}"));
        thread
            .spawn(move || own.work())
            .map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        Ok(stream)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds work behind all other work.
    pub fn push(self: &Arc<Self>, waits: Vec<Mark>, task: Task) -> Mark {
        let mut state = self.state();
        state.queue.push_back((waits, task));
        state.submitted += 1;
        let number = state.submitted;
        drop(state);
        self.changed.notify_all();
        Mark {
            stream: Arc::clone(self),
            number,
        }
    }

    /// All work so far.
    pub fn mark(self: &Arc<Self>) -> Mark {
        Mark {
            stream: Arc::clone(self),
            number: self.state().submitted,
        }
    }

    /// Ends the thread when all work is done.
    pub fn close(&self) {
        self.state().closed = true;
        self.changed.notify_all();
    }

    fn work(&self) {
        loop {
            let mut state = self.state();
            let (waits, task) = loop {
                if let Some(next) = state.queue.pop_front() {
                    break next;
                }
                if state.closed {
                    return;
                }
                state = self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            };
            drop(state);
            for wait in waits {
                wait.wait();
            }
            // After a fault nothing is executed, but all that waits goes on.
            if let Some(context) = self.context.upgrade()
                && context.check().is_ok()
                && let Err(error) = task(&context)
            {
                context.fail(error);
            }
            self.state().completed += 1;
            self.changed.notify_all();
        }
    }
}

/// An event.
#[derive(Default)]
pub struct Event {
    pub timed: bool,
    recorded: Mutex<Option<(Mark, Arc<OnceLock<Instant>>)>>,
    /// The graph that it was recorded in, if that was in a capture.
    pub captured: Mutex<Option<Arc<Graph>>>,
}

impl Event {
    /// An event that is done, as it was never recorded.
    pub fn new(timed: bool) -> Self {
        Self {
            timed,
            ..Self::default()
        }
    }

    fn recorded(&self) -> MutexGuard<'_, Option<(Mark, Arc<OnceLock<Instant>>)>> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers what it stands for.
    pub fn record(&self, mark: Mark, time: Arc<OnceLock<Instant>>) {
        *self.recorded() = Some((mark, time));
    }

    /// What it stands for, if it was recorded.
    pub fn mark(&self) -> Option<Mark> {
        self.recorded().as_ref().map(|(mark, _)| mark.clone())
    }

    /// When it was reached.
    pub fn time(&self) -> Option<Instant> {
        self.recorded()
            .as_ref()
            .and_then(|(_, time)| time.get().copied())
    }
}

/// Work in an order in which all that it waits for comes first.
#[derive(Default)]
pub struct Graph {
    pub handle: u64,
    /// How it is captured, if it is: calls that may disturb a global capture are refused to all threads.
    pub is_global: bool,
    /// It is being captured, which such a call has ended: no graph comes of it.
    is_invalid: AtomicBool,
    nodes: Mutex<Vec<(u64, Task)>>,
    /// Of a clone: the other graph's nodes and its own that stand for them.
    cloned: HashMap<u64, u64>,
    /// What is there as long as a graph has it, by handles.
    kept: Mutex<Vec<(u64, Kept)>>,
}

/// What decides whether, or which of, a node's graphs run.
pub struct Condition {
    pub value: AtomicU32,
    /// What it is at the beginning of each launch, if anything.
    pub default: Option<u32>,
}

/// Something of which only the end matters.
pub type Kept = Arc<dyn Any + Send + Sync>;

impl Graph {
    /// A graph without work.
    pub fn new(handle: u64) -> Self {
        Self {
            handle,
            ..Self::default()
        }
    }

    /// One that is being captured.
    pub fn captured(handle: u64, is_global: bool) -> Self {
        Self {
            handle,
            is_global,
            ..Self::default()
        }
    }

    /// One that does and keeps what another has so far.
    pub fn copy(handle: u64, of: &Self) -> Self {
        Self {
            handle,
            nodes: Mutex::new(of.all().clone()),
            kept: Mutex::new(of.kept().clone()),
            ..Self::default()
        }
    }

    /// One that does and keeps what another has so far, in nodes of its own.
    pub fn clone_of(handle: u64, of: &Self) -> Self {
        let mut cloned = HashMap::new();
        let nodes = of.all().clone().into_iter().map(|(node, task)| {
            let own = objects::number();
            cloned.insert(node, own);
            (own, task)
        });
        let nodes = Mutex::new(nodes.collect());
        Self {
            handle,
            nodes,
            kept: Mutex::new(of.kept().clone()),
            cloned,
            ..Self::default()
        }
    }

    /// The node of a clone that stands for another graph's.
    pub fn in_clone(&self, node: u64) -> Option<u64> {
        self.cloned.get(&node).copied()
    }

    /// A call has come that a capture to this graph does not allow.
    pub fn refuse<T>(&self) -> Answer<T> {
        self.is_invalid.store(true, Ordering::Release);
        Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    }

    /// Fails if a capture to this graph has become invalid.
    pub fn valid(&self) -> Answer {
        match self.is_invalid.load(Ordering::Acquire) {
            true => Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
            false => Ok(()),
        }
    }

    fn all(&self) -> MutexGuard<'_, Vec<(u64, Task)>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kept(&self) -> MutexGuard<'_, Vec<(u64, Kept)>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds work: the node's handle.
    pub fn push(&self, task: Task) -> u64 {
        let node = objects::number();
        self.all().push((node, task));
        node
    }

    /// Gives a node other work. Whether it is here.
    pub fn replace(&self, node: u64, task: Task) -> bool {
        let mut all = self.all();
        let found = all.iter_mut().find(|(one, _)| *one == node);
        found.map(|(_, work)| *work = task).is_some()
    }

    /// Does from here on what another graph does, in its own nodes, and keeps what that keeps. Whether the other one has
    /// as many.
    pub fn update(&self, of: &Self) -> bool {
        let work = of.nodes();
        let mut all = self.all();
        if all.len() != work.len() {
            return false;
        }
        let nodes = all.iter_mut().map(|(_, own)| own);
        nodes.zip(work).for_each(|(own, work)| *own = work);
        drop(all);
        let before = std::mem::replace(&mut *self.kept(), of.kept().clone());
        // Its end may call the program.
        drop(before);
        true
    }

    /// All nodes so far. Each comes behind the one before.
    pub fn handles(&self) -> Vec<u64> {
        self.all().iter().map(|(node, _)| *node).collect()
    }

    /// Keeps something.
    pub fn keep(&self, handle: u64, kept: Kept) {
        self.kept().push((handle, kept));
    }

    /// Keeps something no longer. Whether it did.
    pub fn release(&self, handle: u64) -> bool {
        let mut kept = self.kept();
        let place = kept.iter().position(|(one, _)| *one == handle);
        let gone = place.map(|place| kept.remove(place));
        // Its end may call the program.
        drop(kept);
        gone.is_some()
    }

    /// All work so far.
    pub fn nodes(&self) -> Vec<Task> {
        self.all()
            .iter()
            .map(|(_, task)| Arc::clone(task))
            .collect()
    }
}
